"""What the decoder of an encoder-decoder attends to: the encoder's output of each request, without padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...undo.state import state_of
from .generation_state import LoopCall


def encoder_refusal(call: LoopCall, *, own_cache: bool) -> str | None:
    """Return why a call of an encoder-decoder cannot run ragged, as one clause; None if it can."""
    states, mask = _states(call), call.inputs.get("attention_mask")
    rows, columns = call.input_ids.shape
    if not own_cache:
        return "a cache that is passed along says nothing of the encoder's output"
    if call.config.return_dict_in_generate:
        return "return_dict_in_generate=True returns a cache with the keys of the encoder's output"
    if not isinstance(states, Tensor) or states.ndim != 3 or len(states) != rows:
        return "it is not given the encoder's output of each row"
    if call.mask is not None and not bool(call.mask.all()):
        return "padding stands before tokens of the decoder"
    if columns > 1 and bool((call.input_ids == call.pad_token).any()):
        return "a padding token stands in a prompt of the decoder"
    if mask is None or not _hides(call):
        return None
    if mask.shape != states.shape[:2]:
        return "its attention_mask is not one of the rows of the encoder's output"
    return None if bool((mask != 0).any(1).all()) else "its attention_mask hides all of the encoder's output of a row"


def sources(call: LoopCall) -> list[Tensor | None]:
    """Return the encoder's output [T, C] that each row attends to; None for each row of a model without an encoder."""
    if not call.has_encoder:
        return [None] * len(call.input_ids)
    states, mask = _states(call), call.inputs.get("attention_mask")
    if mask is None or not _hides(call):
        return list(states)
    return [row[kept != 0] for row, kept in zip(states, mask, strict=True)]


def _hides(call: LoopCall) -> bool:
    return bool(state_of(call.model).generation.hides_rows)


def _states(call: LoopCall) -> Any:
    return getattr(call.inputs.get("encoder_outputs"), "last_hidden_state", None)
