"""The plan of which encoder layers run by their trace: of each, its code is run once with stand-ins."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...attention.hf import ATTENTION_NAME
from ...models import is_within
from ...recognition.code import source_of
from ...recognition.encoder_trace import MASK, EncoderTrace, StackTrace, usual_form
from ...recognition.mask_code import adds_to_masks
from ...recognition.operation import UntraceableError
from ...recognition.unchanged import has_own_forward
from .decoder_calls import has_no_head
from .encoder_calls import EncoderForward, EncoderLayerCalls, EncoderStackCalls, scale_of
from .layer_calls import attend_of
from .sites import Dropped, FusedSite, refuse_partial_rotation, refuse_without_kernel

LAYER, STACK = "encoder layer", "encoder"
OVER_ROWS = {"linear", "gated", "attend", "add", "layer_norm", "norm", "gate", "rope"}  # operations with a native call


def encoder_sites(
    model: nn.Module, dtype: torch.dtype, *, attends: Iterable[nn.Module], linears: Container[nn.Module],
    generates: bool = False,
) -> tuple[list[FusedSite], list[Dropped]]:  # fmt: skip
    """Find encoder layers of which every operation is known, and encoders that do nothing but call such layers.

    attends: the modules whose attention is ours. linears: the linear layers that the native kernels compute.
    generates: whether the model generates text, so that its causal layers are those of a decoder, with a cache.
    """
    attending = {module for module in attends if not (generates and getattr(module, "is_causal", True))}
    sites: list[FusedSite] = []
    dropped: list[Dropped] = []
    for name, layer, attention in _layers(model, attending):
        is_causal, around = getattr(attention, "is_causal", True), _model_around(model, name)
        masks = _masks(model, name, is_causal=is_causal)
        if is_causal and masks is Masks.OTHERS:
            continue
        reason = _refusal(layer, dtype, linears=linears, attention=attention, masks=masks, around=around)
        if reason is None:
            leaves_padding = _reads_tokens(around) and (masks is Masks.OTHERS or has_no_head(model))
            sites.append(FusedSite(name, layer, LAYER, EncoderForward, EncoderLayerCalls(leaves_padding)))
        else:
            dropped.append(Dropped(name, LAYER, reason))
    return [*sites, *_stacks(model, dtype, {site.module for site in sites})], dropped


def _layers(model: nn.Module, attending: set[nn.Module]) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """The modules of lists in which one module attends, with their names and this module."""
    for place, parent in model.named_modules():
        if not isinstance(parent, nn.ModuleList):
            continue
        for name, layer in parent.named_children():
            inner = [module for module in layer.modules() if module in attending]
            has_layers = any(
                isinstance(module, nn.ModuleList) and attending & set(module.modules()) for module in layer.modules()
            )
            if len(inner) == 1 and layer not in attending and not has_layers:
                yield f"{place}.{name}", layer, inner[0]


class Masks(Enum):
    """The masks that the code around a layer makes."""

    CAUSAL = auto()
    CAUSAL_WITH_FLAG = auto()  # is_causal=True is given to the layers
    OTHERS = auto()


def _masks(model: nn.Module, name: str, *, is_causal: bool) -> Masks:
    """Return which masks the code around a layer makes. That of CLIP's texts gives them is_causal=True, and that of
    Gemma makes masks of both kinds.

    is_causal: whether the layer's attention is, for which masks of both kinds are causal.
    """
    while name:
        name = name.rpartition(".")[0]
        kind: Any = type(model.get_submodule(name))
        code = source_of(kind) or ""
        if "create_bidirectional_mask" in code or ("or_mask_function" in code and not is_causal):
            return Masks.OTHERS
        if "create_causal_mask" in code:
            return Masks.CAUSAL_WITH_FLAG if "is_causal=True" in code else Masks.CAUSAL
    return Masks.OTHERS


def _model_around(model: nn.Module, name: str) -> PreTrainedModel | None:
    """Return the innermost model around a module."""
    around = [
        outer
        for place, outer in model.named_modules()
        if isinstance(outer, PreTrainedModel) and is_within(name, place)
    ]
    return around[-1] if around else None


def _reads_tokens(around: PreTrainedModel | None) -> bool:
    """Return whether a model reads tokens, which heads and users tell from padding.

    Frames of sound are another matter: a CTC head reads those of padding too, and they are written out.
    """
    return around is not None and around.main_input_name == "input_ids"


def _refusal(
    layer: nn.Module,
    dtype: torch.dtype,
    *,
    linears: Container[nn.Module],
    attention: nn.Module,
    masks: Masks,
    around: PreTrainedModel | None,
) -> str | None:
    """Return why a layer has no trace that can be computed, as a clause; None if it has one."""
    if has_own_forward(layer):
        return "its forward was replaced on the module itself"
    if around is not None and adds_to_masks(around):
        return "something is added to its mask"
    try:
        form = usual_form(type(layer), dtype)
        if masks is Masks.CAUSAL_WITH_FLAG:
            form = replace(form, plain=(("is_causal", bool, True),))
        trace = EncoderTrace(dtype, attention=ATTENTION_NAME)
        trace.encoder_layer(layer, _width(attention), form)
        causal = attend_of(trace)[2]
        if masks is Masks.CAUSAL and not causal:
            raise UntraceableError("its tokens see those before them alone")
        scale_of(trace, masked=MASK in form.tensors, causal=causal)
        refuse_without_kernel(trace, linears, "cpu")
        if around is not None and any(operation.kind == "rope" for operation in trace.operations):
            refuse_partial_rotation(around.config)
    except UntraceableError as error:
        return str(error)
    others = {operation.kind for operation in trace.operations} - OVER_ROWS
    return f"{min(others)} has no native call over rows" if others else None


def _width(attention: nn.Module) -> int:
    """Return the size of the hidden states that an attention module is given: the inputs of its first product."""
    for module in attention.modules():
        if isinstance(module, nn.Linear):
            return int(module.in_features)
    raise UntraceableError("it has no linear layer")


def _stacks(model: nn.Module, dtype: torch.dtype, layers: set[nn.Module]) -> Iterator[FusedSite]:
    """The modules around lists of layers of which all are known, whose code does nothing but call them."""
    for name, module in model.named_modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child)]
        if len(lists) != 1 or not layers.issuperset(lists[0]) or has_own_forward(module):
            continue
        try:
            StackTrace(dtype, layers).stack(module, 1, usual_form(type(module)))
        except UntraceableError:
            continue
        yield FusedSite(
            name, module, STACK, EncoderForward, EncoderStackCalls(_reads_tokens(_model_around(model, name)))
        )
