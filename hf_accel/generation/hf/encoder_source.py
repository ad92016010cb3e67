"""The output of an encoder that a decoder attends to, of each request and without padding."""

from __future__ import annotations

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
from ..prompt_inputs import RequestInputs
from .decoder_call import UpToDecoder
from .generation_state import LoopCall
from .model_runner import prepare_step

HIDING = "encoder_attention_mask"  # the argument of a decoder that says which rows of an encoder's output there are


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
    """Give a call transformers' own cache instead of one that was made for ragged passes of an encoder-decoder, of a
    decoder alone that is given an encoder's output, of which pages without a part of their own keep no keys, or of
    prompts behind embeddings of an adapter.
    """
    if not isinstance(call.cache, PagedCache):
        return
    config = layers_config(call.model.config)
    if call.has_encoder:
        call.inputs["past_key_values"] = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    elif call.num_learnt or call.inputs.get(SOURCE_STATES) is not None:
        call.inputs[call.state.cache_name] = DynamicCache(config=config)


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


@torch.no_grad()
def _mask(call: LoopCall) -> Tensor | None:
    """Return which rows of the encoder's output [B, T] the model's own code shows to its decoder; None for all.

    It may make them of an attention_mask of frames of a sound, or have them of the encoder. Raises NotRaggedError if
    it is not known where the decoder begins.
    """
    if not call.state.form.hides_rows:
        return None
    given = {name: call.inputs.get(name) for name in ("encoder_outputs", "attention_mask")}
    called = UpToDecoder(call.model, prepare_step)(decoder_input_ids=call.input_ids, use_cache=False, **given)
    return called.get(HIDING)


# -- requests ------------------------------------------------------------------------------------------------


def decoder_prompt(model: PreTrainedModel, config: Any, ids: list[int]) -> tuple[list[int], RequestInputs]:
    """Return the tokens with which the sequences of an encoder-decoder begin, and what else the request brings.

    config: a complete GenerationConfig. ids: of the encoder. Raises UnsupportedError for settings that need the
    encoder's ids themselves.
    """
    for name, plain in (("encoder_repetition_penalty", 1.0), ("encoder_no_repeat_ngram_size", 0)):
        if getattr(config, name, None) not in (None, plain):
            raise UnsupportedError(f"continuous batching cannot serve {name}=; use generate()")
    start = config._decoder_start_token_tensor
    if start is None:
        raise UnsupportedError(f"{type(model).__name__} has no decoder_start_token_id; set it in generation_config")
    return start.flatten().tolist()[:1], RequestInputs({"input_ids": ids}, encoder_ids=ids)


@torch.no_grad()
def encoder_output(model: Any, given: Mapping[str, Any]) -> Tensor:
    """Run the encoder of a model on the T input_ids of one request; returns its output [T, C]."""
    inputs = torch.tensor([given["input_ids"]], device=model_device(model))
    output = model.get_encoder()(input_ids=inputs, attention_mask=torch.ones_like(inputs), return_dict=True)
    states: Tensor = output.last_hidden_state[0]
    return states


def _states(call: LoopCall) -> Any:
    return getattr(call.inputs.get("encoder_outputs"), "last_hidden_state", None)
