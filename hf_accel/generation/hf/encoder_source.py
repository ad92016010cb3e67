"""The output of an encoder that a decoder attends to, of each request and without padding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ...cache.hf import PagedCache, attends_to_sources
from ...cache.kinds import SourceRows
from ...errors import NotRaggedError, UnsupportedError
from ...models import layers_config
from ...recognition.call_form import SOURCE_STATES
from ...recognition.unchanged import PLAIN_TYPES
from ...tensors import model_device
from ...undo.journal import original_class
from ...undo.state import state_of
from ..prompt_inputs import TEXT_INPUTS, RequestInputs, other_input, positions_count_tokens
from .decoder_call import UpToDecoder
from .generation_state import LoopCall
from .model_runner import prepare_step
from .request_config import prompt_setting

DECODER_IDS = "decoder_input_ids"
RAGGED_MODES = {GenerationMode[name] for name in ("GREEDY_SEARCH", "SAMPLE", "BEAM_SEARCH", "BEAM_SAMPLE")}


@dataclass
class EncoderOutput(BaseModelOutputWithPooling):
    """The output of an encoder without padding. Code asks some encoders, of sound, for the mask of their output, and
    those with experts for the logits of their routers. It may call what it reads the pooled output.
    """

    attention_mask: Tensor | None = None
    router_logits: Any = None


def with_encoder(cache: Any) -> Any:
    """Return the cache that generate() of an encoder-decoder is given, of which a part is for the encoder's output.

    That part is transformers' own; ragged passes keep both in the pages. A cache without pages stays as it is.
    """
    return EncoderDecoderCache(cache, DynamicCache()) if isinstance(cache, PagedCache) else cache


def pages_serve(config: Any, mode: GenerationMode) -> bool:
    """Return whether a paged cache serves a mode of generate(): transformers' own loops use no keys of sources."""
    if not attends_to_sources(config) or mode in RAGGED_MODES:
        return True
    return mode == GenerationMode.ASSISTED_GENERATION and not config.is_encoder_decoder


def with_cache(model: PreTrainedModel, config: Any) -> Any:
    """Return the settings that generate() has made for a call, with a cache if only the model's own leave one out, and
    it changes no token.
    """
    own: Any = model.generation_config
    if own.use_cache is False and state_of(model).generation.form.needs_no_cache:
        config.use_cache = True
    return config


def give_stock_cache(call: LoopCall) -> None:
    """Give a call transformers' own cache instead of one that was made for ragged passes, where its pages cannot hold
    what it needs: the keys of sources, or of prompts behind embeddings of an adapter.
    """
    state = call.state.call
    if state is None or not state.own_cache or not isinstance(state.cache, PagedCache):
        return
    config = layers_config(call.model.config)
    if call.state.given is not None:
        call.inputs[call.state.cache_name] = DynamicCache(config=config)
    elif call.has_encoder:
        kind: Any = original_class(call.model)
        # A class with a method of its own, as T5Gemma, keeps windows away from the keys of the encoder's output.
        is_own = kind._prepare_cache_for_generation is not GenerationMixin._prepare_cache_for_generation
        of_source = DynamicCache() if is_own else DynamicCache(config=config)
        call.inputs[call.state.cache_name] = EncoderDecoderCache(DynamicCache(config=config), of_source)
    elif call.num_learnt or call.attends_to_sources or call.inputs.get(SOURCE_STATES) is not None:
        call.inputs[call.state.cache_name] = DynamicCache(config=config)


def encoder_refusal(call: LoopCall, *, own_cache: bool) -> str | None:
    """Return why a call of an encoder-decoder cannot run ragged, as one clause; None if it can."""
    rows, columns = call.input_ids.shape
    if not own_cache:
        return "a cache that is passed along says nothing of the encoder's output"
    try:
        states = _states(call)
    except NotRaggedError as error:
        return str(error)
    if not isinstance(states, Tensor) or states.ndim != 3 or len(states) != rows:
        return "it is not given the encoder's output of each row"
    counted = _is_counted(call)
    if call.mask is not None and not bool(call.mask.all()) and not counted:
        return "padding stands before tokens of the decoder"
    if columns > 1 and bool((call.input_ids == call.pad_token).any()) and not counted:
        return "a padding token stands in a prompt of the decoder"
    if columns > 1 and call.state.form.reads_ahead:
        return "the tokens of its decoder's prompt see later ones"
    most = call.state.form.most_tokens
    if most is not None and rows * columns > most:
        return f"its experts leave out tokens where a pass has more than {most}"
    try:
        mask = _mask(call)
    except NotRaggedError as error:
        return str(error)
    if mask is None:
        return None
    if mask.shape != states.shape[:2]:
        return "its attention_mask is not one of the rows of the encoder's output"
    return None if bool((mask != 0).any(1).all()) else "its attention_mask hides all of the encoder's output of a row"


def _is_counted(call: LoopCall) -> bool:
    """Return whether a decoder is given positions that count the tokens, and neither what pads nor any one of them."""
    positions, mask = call.inputs.get("position_ids"), call.mask
    if call.state.given is None or positions is None:
        return False
    return positions_count_tokens(positions, None if mask is None else mask.bool())


@torch.no_grad()
def others_refusal(call: LoopCall) -> str | None:
    """Return why an encoder-decoder cannot run ragged with other inputs than an encoder's output, as one clause; None
    if it is given no others, or if they reach the encoder alone, whose output is there.

    With and without them, the model's own code gives its decoder the same, and says the same of the prompt.
    """
    known = {name: value for name, value in call.inputs.items() if name in (*call.encoder_inputs, "attention_mask")}
    others = {name: value for name, value in call.inputs.items() if name not in {*known, *TEXT_INPUTS}}
    name = other_input(others)
    if name is None:
        return None
    given = {**known, "decoder_input_ids": call.input_ids, "use_cache": False}
    try:
        calls = UpToDecoder(call.model, prepare_step)
        called, alone = calls(**given, **others), calls(**given)
    except NotRaggedError as error:
        return f"it is given {name}, and {error}"
    same = called.keys() == alone.keys() and all(_is_same(value, alone[key]) for key, value in called.items())
    same = same and _is_same(*(call.model(**given, **more).logits for more in (others, {})))
    return None if same else f"it is given {name}"


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return first is second or (type(first) is type(second) and isinstance(first, PLAIN_TYPES) and first == second)


def sources(call: LoopCall) -> list[SourceRows]:
    """Return the encoder's output that each row of a call of an encoder-decoder attends to."""
    states, mask = _states(call), _mask(call)
    if mask is None:
        return list(map(SourceRows, states))
    return [SourceRows(row[kept != 0]) for row, kept in zip(states, mask, strict=True)]


def _mask(call: LoopCall) -> Tensor | None:
    """Return which rows of the encoder's output [B, T] the model's own code shows to its decoder; None for all."""
    if not call.state.form.hides_rows:
        return None
    if "source_mask" not in call.found:
        given = {name: call.inputs.get(name) for name in ("encoder_outputs", "attention_mask")}
        call.found["source_mask"] = _shown(call.model, call.input_ids, given)
    mask: Tensor | None = call.found["source_mask"]
    return mask


@torch.no_grad()
def _shown(model: PreTrainedModel, decoder_ids: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    """Return the mask of the encoder's output that a decoder is given; None for none.

    The model may make it of an attention_mask of frames of a sound, or have it of the encoder. given: these two, by
    the names that the model has for them. Raises NotRaggedError if it is not known where the decoder begins.
    """
    calls = UpToDecoder(model, prepare_step)
    return calls(decoder_input_ids=decoder_ids, use_cache=False, **given).get(calls.hiding)


# -- requests ------------------------------------------------------------------------------------------------


def decoder_prompt(
    model: Any, config: Any, ids: list[int], inputs: RequestInputs | None = None
) -> tuple[list[int], RequestInputs]:
    """Return the tokens with which the sequences of an encoder-decoder begin, and what else the request brings.

    config: a complete GenerationConfig. ids, inputs: of a prompt, see prompt_parts; decoder_input_ids among the inputs
    are tokens that the decoder begins with. Raises UnsupportedError for settings that need the encoder's ids
    themselves, and for inputs that the encoder does not take, or the tokens that the decoder cannot begin with.
    """
    if (name := prompt_setting(config)) is not None and not ids:
        raise UnsupportedError(f"{name}= reads the token ids of the encoder, and it is given none; use generate()")
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
    most = state_of(model).generation.form.most_tokens
    if most is not None and len(tokens) > most:
        raise UnsupportedError(
            f"decoder_input_ids of {len(tokens)} tokens, of which the experts of {kind} take {most} at once, are not "
            "served; make them shorter, or use model.generate()"
        )
    if len(tokens) > 1 and (state_of(model).generation.form.reads_ahead or config._pad_token_tensor in tokens):
        raise UnsupportedError(
            f"decoder_input_ids of {len(tokens)} tokens, in which stock's {kind} sees later ones or padding, are not "
            "served; leave them out, or use model.generate()"
        )
    return tokens, RequestInputs({"input_ids": ids, **given} if ids else given, encoder_ids=ids)


@torch.no_grad()
def encoder_output(model: Any, tokens: list[int], given: Mapping[str, Any]) -> SourceRows:
    """Run the encoder of a model on what one request brings; returns the rows of its output that are shown.

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
    ids = torch.tensor([tokens], device=device)
    states: Tensor = _rows_read(model, ids, output)
    if "input_ids" in inputs or not state_of(model).generation.form.hides_rows:
        return SourceRows(states[0])
    own = {"encoder_outputs": output, "attention_mask": inputs.get("attention_mask")}
    mask = _shown(model, ids, own)
    if mask is not None and (mask.shape != states.shape[:2] or not mask.any()):
        raise NotRaggedError("its mask is not one of the rows of the encoder's output, or hides all of them")
    return SourceRows(states[0] if mask is None else states[0][mask[0] != 0])


def _taken(encoder: Any) -> Mapping[str, Any]:
    """Return the parameters of an encoder's forward, by name."""
    return inspect.signature(original_class(encoder).forward).parameters


def rows_as_output(states: Tensor) -> EncoderOutput:
    """Return the output of an encoder whose rows [B, T, C] its decoder reads, under whatever name it reads them."""
    return EncoderOutput(last_hidden_state=states, pooler_output=states)


def _states(call: LoopCall) -> Any:
    return _rows_read(call.model, call.input_ids, call.inputs.get("encoder_outputs"))


@torch.no_grad()
def _rows_read(model: PreTrainedModel, decoder_ids: Tensor, output: Any) -> Any:
    """Return the rows [B, T, C] of the encoder's output that the decoder reads. Raises NotRaggedError if it is not
    known where the decoder begins.
    """
    states, pooled = (getattr(output, name, None) for name in ("last_hidden_state", "pooler_output"))
    if isinstance(pooled, Tensor) and pooled.ndim == 3:
        called = UpToDecoder(model, prepare_step)(
            decoder_input_ids=decoder_ids, use_cache=False, encoder_outputs=output
        )
        return pooled if any(value is pooled for value in called.values()) else states
    return states
