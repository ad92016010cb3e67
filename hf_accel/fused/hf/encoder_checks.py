"""The checks of a call of an encoder layer: of its attention, its mask and its cache."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...attention import PlannedAttention
from ...attention.cpu import LARGEST_DIM, CpuBackend
from ...attention.hf.mask import CausalMask, as_known
from ...attention.hf.stock import ATTENTION_NAME, EAGER, SDPA
from ...recognition.operation import UntraceableError
from ...recognition.stand_ins import ATTENTION_KEPT
from ...recognition.trace import Trace
from ...undo.state import BACKEND_ATTRIBUTE
from ..encoder_programme import EncoderProgramme, attended_window
from ..encoder_rows import RowLayout, causal_layout
from .layer_attention import attend_of, note_plan, sees_all


def refuse_functions_of_users(trace: Trace, layer: nn.Module) -> None:
    """Raise UntraceableError for an attention function that must not be called with stand-ins, as it is not known."""
    configs = [vars(module)["config"] for module in layer.modules() if "config" in vars(module)]
    for own in {id(config): vars(config) for config in configs if hasattr(config, "to_dict")}.values():
        name = own.get(ATTENTION_KEPT)
        trace.note(own, ATTENTION_KEPT, name)
        if name not in (None, ATTENTION_NAME, SDPA, EAGER):
            raise UntraceableError("its attention function is not known")


def is_empty(cache: Any, layer_idx: int | None) -> bool:
    """Return whether a DynamicCache has nothing of a layer yet, and will keep keys and values as they are."""
    if layer_idx is None or getattr(cache, "offloading", False):
        return False
    if layer_idx >= len(cache.layers):
        return cache.layer_class_to_replicate is DynamicLayer
    layer = cache.layers[layer_idx]
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and not layer.is_initialized


def layout_for(programme: EncoderProgramme, mask: Any, batch: int, tokens: int) -> RowLayout | None:
    """Return the layout of a batch with a mask, or a CausalMask; None if the layer must run its own code."""
    ours: CausalMask | None = as_known(mask)
    if ours is None:
        return programme.layout_of(mask, batch, tokens)
    if ours.lengths != (tokens, tokens):
        return None
    window, first_counts = ours.meaning.window, programme.first_counts
    return causal_layout(ours.columns, batch, tokens, window, first_counts=first_counts)


def scale_of(trace: Trace, *, masked: bool, causal: bool = False, keeps_sdpa: bool = False) -> float:
    """Return the scale of the trace's attention, which must be that to all tokens that the mask shows, or to those
    before a query's own alone if `causal`. Raises UntraceableError.

    masked: whether the call has a mask. keeps_sdpa: whether the attention is torch's, which caps no scores.
    """
    operation, scale, is_causal = attend_of(trace)
    values, is_causal = operation.values, is_causal and (causal or not sees_all(operation, masked=masked))
    if values["masked"] is not masked:
        raise UntraceableError("its attention leaves the mask out")
    if values["dim"] > LARGEST_DIM:
        raise UntraceableError("its heads are too large")
    attended_window(trace.operations)  # which must be known
    if is_causal is not causal or (keeps_sdpa and (causal or values["options"].get("softcap"))):
        raise UntraceableError("its attention is not that of all tokens to all that the mask shows")
    if values["biased"] and (causal or values["options"].get("softcap") or trace.layer_idx is not None):
        raise UntraceableError("its attention has a bias, and is causal, capped, or that over a cache")
    for module in operation.modules:  # none if the code computes the scores by itself
        planned: PlannedAttention | None = vars(module).get(BACKEND_ATTRIBUTE)
        note_plan(trace, module)
        if planned is not None and not isinstance(planned.backend, CpuBackend):
            raise UntraceableError("its attention has another backend")
    return scale * values["factor"]
