"""The output of an encoder that a decoder attends to, of each request and without padding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from ...cache.hf import PagedCache
from ...errors import NotRaggedError, UnsupportedError
from ...models import layers_config
from ...recognition.call_form import SOURCE_STATES
from ...tensors import model_device
from ...undo.journal import original_class
from ...undo.state import state_of
from ..prompt_inputs import RequestInputs
from .decoder_call import UpToDecoder
from .generation_state import LoopCall
from .model_runner import prepare_step

DECODER_IDS = "decoder_input_ids"


@dataclass
class EncoderOutput(BaseModelOutput):
    """The output of an encoder without padding. Code asks some encoders, of sound, for the mask of their output, and
    those with experts for the logits of their routers.
    """

    attention_mask: Tensor | None = None
    router_logits: Any = None


def with_encoder(cache: Any) -> Any:
    """Return the cache that generate() of an encoder-decoder is given, of which a part is for the encoder's output.

    That part is transformers' own; ragged passes keep both in the pages. A cache without pages stays as it is.
    """
    return EncoderDecoderCache(cache, DynamicCache()) if isinstance(cache, PagedCache) else cache


def give_stock_cache(call: LoopCall) -> None:
    """Give a call transformers' own cache instead of one that was made for ragged passes of an encoder-decoder, or of
    a decoder alone that is given an encoder's output, of which pages without a part of their own keep no keys."""
    if not isinstance(call.cache, PagedCache):
        return
    config = layers_config(call.model.config)
    if call.has_encoder:
        call.inputs["past_key_values"] = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    elif call.inputs.get(SOURCE_STATES) is not None:
        call.inputs["past_key_values"] = DynamicCache(config=config)


def encoder_refusal(call: LoopCall, *, own_cache: bool) -> str | None:
    """Return why a call of an encoder-decoder cannot run ragged, as one clause; None if it can."""
    states = _states(call)
    rows, columns = call.input_ids.shape
    if not own_cache:
        return "a cache that is passed along says nothing of the encoder's output"
    if not isinstance(states, Tensor) or states.ndim != 3 or len(states) != rows:
        return "it is not given the encoder's output of each row"
    if call.mask is not None and not bool(call.mask.all()):
        return "padding stands before tokens of the decoder"
    if columns > 1 and bool((call.input_ids == call.pad_token).any()):
        return "a padding token stands in a prompt of the decoder"
    if columns > 1 and call.state.form.reads_ahead:
        return "the tokens of its decoder's prompt see later ones"
    try:
        mask = _mask(call)
    except NotRaggedError as error:
        return str(error)
    if mask is None:
        return None
    if mask.shape != states.shape[:2]:
        return "its attention_mask is not one of the rows of the encoder's output"
    return None if bool((mask != 0).any(1).all()) else "its attention_mask hides all of the encoder's output of a row"


def sources(call: LoopCall) -> list[Tensor]:
    """Return the encoder's output [T, C] that each row of a call of an encoder-decoder attends to."""
    states, mask = _states(call), _mask(call)
    if mask is None:
        return list(states)
    return [row[kept != 0] for row, kept in zip(states, mask, strict=True)]


def _mask(call: LoopCall) -> Tensor | None:
    """Return which rows of the encoder's output [B, T] the model's own code shows to its decoder; None for all."""
    given = {name: call.inputs.get(name) for name in ("encoder_outputs", "attention_mask")}
    return _shown(call.model, call.input_ids, given) if call.state.form.hides_rows else None


@torch.no_grad()
def _shown(model: PreTrainedModel, decoder_ids: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    """Return the mask of the encoder's output that a decoder is given; None for none.

    The model may make it of an attention_mask of frames of a sound, or have it of the encoder. given: these two, by
    the names that the model has for them. Raises NotRaggedError if it is not known where the decoder begins.
    """
    calls = UpToDecoder(model, prepare_step)
    return calls(decoder_input_ids=decoder_ids, use_cache=False, **given).get(calls.hiding)


def encoder_alone_reads(call: LoopCall, name: str) -> bool:
    """Return whether an input is one of the encoder, and the decoder is called with the same arguments without it."""
    if name not in _taken(call.model.get_encoder()):
        return False
    given = {each: call.inputs.get(each) for each in ("encoder_outputs", "attention_mask")}
    calls = UpToDecoder(call.model, prepare_step)
    try:
        with_it, without = (
            calls(decoder_input_ids=call.input_ids, use_cache=False, **given, **more)
            for more in ({name: call.inputs[name]}, {})
        )
    except Exception:  # code that is not known may do anything
        return False
    return with_it.keys() == without.keys() and all(_is_same(with_it[each], without[each]) for each in without)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or (isinstance(one, bool | int | float | str) and one == other)


# -- requests ------------------------------------------------------------------------------------------------


def decoder_prompt(
    model: Any, config: Any, ids: list[int], inputs: RequestInputs | None = None
) -> tuple[list[int], RequestInputs]:
    """Return the tokens with which the sequences of an encoder-decoder begin, and what else the request brings.

    config: a complete GenerationConfig. ids, inputs: of a prompt, see prompt_parts; decoder_input_ids among the inputs
    are tokens that the decoder begins with. Raises UnsupportedError for settings that need the encoder's ids
    themselves, and for inputs that the encoder does not take, or the tokens that the decoder cannot begin with.
    """
    for name, plain in (("encoder_repetition_penalty", 1.0), ("encoder_no_repeat_ngram_size", 0)):
        if getattr(config, name, None) not in (None, plain):
            raise UnsupportedError(f"continuous batching cannot serve {name}=; use generate()")
    start, kind = config._decoder_start_token_tensor, type(model).__name__
    if start is None:
        raise UnsupportedError(f"{kind} has no decoder_start_token_id; set it in generation_config")
    given = dict(inputs.unread or {}) if inputs is not None else {}
    begins = {DECODER_IDS: torch.tensor([given.pop(DECODER_IDS)])} if DECODER_IDS in given else {}
    unknown = sorted(name for name in given.keys() - {"attention_mask"} if name not in _taken(model.get_encoder()))
    if unknown:
        raise UnsupportedError(f"the encoder of {kind} takes no {unknown[0]!r}; use model.generate()")
    found, _ = model._prepare_decoder_input_ids_for_generation(1, model.main_input_name, begins, start, "cpu")
    tokens: list[int] = found[0].tolist()
    if len(tokens) > 1 and (state_of(model).generation.form.reads_ahead or config._pad_token_tensor in tokens):
        raise UnsupportedError(
            f"decoder_input_ids of {len(tokens)} tokens, in which stock's {kind} sees later ones or padding, are not "
            "served; leave them out, or use model.generate()"
        )
    return tokens, RequestInputs({"input_ids": ids, **given} if ids else given, encoder_ids=ids)


@torch.no_grad()
def encoder_output(model: Any, tokens: list[int], given: Mapping[str, Any]) -> Tensor:
    """Run the encoder of a model on what one request brings; returns the rows [T, C] of its output that are shown.

    tokens: with which the decoder begins. given: token ids, or tensors of one row as a processor makes them. Raises
    UnsupportedError for tensors of another number of rows.
    """
    device = model_device(model)
    inputs = {name: torch.as_tensor([value] if name == "input_ids" else value) for name, value in given.items()}
    for name, value in inputs.items():
        if len(value) != 1:
            raise UnsupportedError(f"{name} has {len(value)} rows; give each prompt by itself, as a batch of one row")
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs = {name: value.to(device) for name, value in inputs.items()}
    encoder = model.get_encoder()
    output = encoder(**{name: inputs[name] for name in inputs if name in _taken(encoder)}, return_dict=True)
    states: Tensor = output.last_hidden_state
    if "input_ids" in inputs or not state_of(model).generation.form.hides_rows:
        return states[0]
    own = {"encoder_outputs": output, "attention_mask": inputs.get("attention_mask")}
    mask = _shown(model, torch.tensor([tokens], device=device), own)
    if mask is not None and (mask.shape != states.shape[:2] or not mask.any()):
        raise NotRaggedError("its mask is not one of the rows of the encoder's output, or hides all of them")
    return states[0] if mask is None else states[0][mask[0] != 0]


def _taken(encoder: Any) -> Mapping[str, Any]:
    """Return the parameters of an encoder's forward, by name."""
    return inspect.signature(original_class(encoder).forward).parameters


def _states(call: LoopCall) -> Any:
    return getattr(call.inputs.get("encoder_outputs"), "last_hidden_state", None)
