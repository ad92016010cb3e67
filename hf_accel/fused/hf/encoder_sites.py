"""The plan of which encoder layers run by their trace: of each, its code is run once with stand-ins."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...attention.hf import ATTENTION_NAME
from ...attention.hf.stock import SDPA, stock_implementation
from ...models import is_within, modules_by_name
from ...recognition.call_form import MASK, STARTS, TABLES, CallForm, usual_form
from ...recognition.code import code_of
from ...recognition.known_modules import INPUTS, known_module
from ...recognition.mask_code import adds_to_masks
from ...recognition.operation import UntraceableError, WidthError
from ...recognition.padding_readers import PaddingReaders
from ...recognition.source import source_of
from ...recognition.stack_trace import StackTrace
from ...recognition.trace import WEIGHTS, Trace
from ...recognition.unchanged import has_own_forward
from ..native_operation import Planned
from ..operations import refuse_over_rows, refuse_without_kernel
from ..site import Dropped, FusedSite, SiteKind
from .decoder_calls import has_no_head
from .encoder_calls import EncoderForward, EncoderLayerCalls, EncoderStackCalls
from .encoder_checks import scale_of
from .layer_attention import attend_of, sees_all
from .layer_sizes import refuse_partial_rotation

LAYER = SiteKind(
    "encoder layer", "encoder layers", "one native call each", "every operation of its code is known",
    else_choice="module by module", computes_all=True,
)  # fmt: skip
STACK = SiteKind(
    "encoder", "encoders", "layer after layer, in one form", "its code calls these layers, and does nothing else",
    computes_all=True,
)  # fmt: skip
RETURNS_WEIGHTS = "it returns the weights of its attention, and the code around it does more than call such layers"


def encoder_sites(
    model: PreTrainedModel, dtype: torch.dtype, *, ours: Collection[nn.Module] | None, linears: Container[nn.Module]
) -> tuple[list[FusedSite], list[Dropped]]:  # fmt: skip
    """Find encoder layers of which every operation is known, and encoders that do nothing but call such layers.

    ours: the modules that will call our attention function; None if attention may not be native. Others may keep
    torch's, or compute attention by themselves: a layer computes the same. linears: the linear layers that the native
    kernels compute. Causal layers of a model that generates text are those of a decoder, and found elsewhere.
    """
    if ours is None:
        return [], []
    sites: list[FusedSite] = []
    dropped: list[Dropped] = []
    with_weights: list[str] = []
    readers = PaddingReaders(model)
    for name, layer, attention in attending_layers(model):
        if any(is_within(name, site.name) for site in sites):
            continue
        is_ours, attends = attention in ours, code_of(attention).attends
        if attends and not (is_ours or _is_sdpa(model, attention)):
            continue
        is_causal = attends and getattr(attention, "is_causal", True)
        masks = _masks(model, name, is_causal=is_causal)
        if masks is Masks.OTHERS and not hasattr(attention, "is_causal") and not model.can_generate():
            is_causal = False  # with the mask that the code makes, as that of LayoutLM does
        if is_causal and (masks is Masks.OTHERS or not is_ours or model.can_generate()):
            continue
        place = AroundLayer(masks, _models_around(model, name), keeps_sdpa=attends and not is_ours)
        reason, returns_weights = _refusal(layer, attention, place, dtype=dtype, linears=linears)
        if returns_weights and model.can_generate():  # by a pass of its own over its code
            reason = RETURNS_WEIGHTS
        elif returns_weights:
            with_weights.append(name)
        if reason is None:
            heads_skip_padding = has_no_head(model) or (masks is Masks.OTHERS and not model.can_generate())
            leaves_padding = heads_skip_padding and _leaves_padding(place.models)
            calls = EncoderLayerCalls(readers if leaves_padding else None, place.keeps_sdpa)
            sites.append(FusedSite(name, layer, LAYER, EncoderForward, calls))
        elif not _has_layers(layer):
            dropped.append(Dropped(name, LAYER, reason))
    stacks = list(_stacks(model, dtype, {site.module: site.state for site in sites}))
    alone = {name for name in with_weights if not any(is_within(name, stack.name) for stack in stacks)}
    dropped += [Dropped(site.name, LAYER, RETURNS_WEIGHTS) for site in sites if site.name in alone]
    return [*(site for site in sites if site.name not in alone), *stacks], dropped


def _is_sdpa(model: PreTrainedModel, module: nn.Module) -> bool:
    return stock_implementation(model, module) == SDPA


def attending_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """The modules of lists in which one module attends, with their names and this module; outer ones come first."""
    for place, parent in modules_by_name(model):
        if not isinstance(parent, nn.ModuleList):
            continue
        for name, layer in parent.named_children():
            inner = [module for module in layer.modules() if _attends(module)]
            if len(inner) == 1 and not _attends(layer):
                yield f"{place}.{name}", layer, inner[0]


def _attends(module: nn.Module) -> bool:
    """Return whether a module's code attends, by a function of transformers' interface or by itself."""
    code, known = code_of(module), known_module(module)
    return code.attends or code.refusal is not None or (known is not None and known[0].attends)


def _has_layers(layer: nn.Module) -> bool:
    return any(
        isinstance(module, nn.ModuleList) and any(map(_attends, module.modules())) for module in layer.modules()
    )


class Masks(Enum):
    """The masks that the code around a layer makes."""

    CAUSAL = auto()
    CAUSAL_WITH_FLAG = auto()  # is_causal=True is given to the layers
    OTHERS = auto()


@dataclass(frozen=True)
class AroundLayer:
    """The code around a layer. masks: those that it makes. models: those around the layer, the innermost is the last.

    keeps_sdpa: as that of EncoderLayerCalls.
    """

    masks: Masks
    models: list[PreTrainedModel]
    keeps_sdpa: bool


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


def _models_around(model: nn.Module, name: str) -> list[PreTrainedModel]:
    """Return the models around a module, of which the innermost is the last."""
    return [
        outer
        for place, outer in modules_by_name(model)
        if isinstance(outer, PreTrainedModel) and is_within(name, place)
    ]


def _leaves_padding(around: list[PreTrainedModel]) -> bool:
    """Return whether what a module within these models returns at padding may be zeros.

    It may where the innermost one reads tokens, which heads and users tell from padding. Frames of sound are another
    matter: a CTC head reads those of padding too, and they are written out. Nor may it before a decoder, whose
    cross-attention sees padding where a call has no mask.
    """
    if not around or any(outer.config.is_encoder_decoder for outer in around):
        return False
    return around[-1].main_input_name == "input_ids"


def _refusal(
    layer: nn.Module, attention: nn.Module, place: AroundLayer, *, dtype: torch.dtype, linears: Container[nn.Module]
) -> tuple[str | None, bool]:
    """Return why a layer has no trace that can be computed, as a clause, or None if it has one; and whether it returns
    the weights of its attention, which only an encoder that is known leaves unread.
    """
    if has_own_forward(layer):
        return "its forward was replaced on the module itself", False
    around = place.models
    try:
        form = usual_form(type(layer), dtype, INPUTS)
        if place.masks is Masks.CAUSAL_WITH_FLAG:
            form = replace(form, plain=(("is_causal", bool, True),))
        trace = _trace(layer, attention, form, dtype)
        operation, _, causal = attend_of(trace)
        if around and adds_to_masks(around[-1]) and operation.values.get("places") is None:  # which looks at it
            raise UntraceableError("something is added to its mask")
        if place.masks is Masks.OTHERS and sees_all(operation, masked=MASK in form.tensors):
            causal = False
        if place.masks is Masks.CAUSAL and not causal:
            raise UntraceableError("its tokens see those before them alone")
        scale_of(trace, masked=MASK in form.tensors, causal=causal, keeps_sdpa=place.keeps_sdpa)
        refuse_without_kernel(trace.operations, Planned(dtype, linears, "cpu", over_rows=True))
        refuse_over_rows(trace.operations)
        if around and any(operation.kind == "rope" for operation in trace.operations):
            refuse_partial_rotation(around[-1].config)
    except UntraceableError as error:
        return str(error), False
    return None, WEIGHTS in (trace.others or ())


def _trace(layer: nn.Module, attention: nn.Module, form: CallForm, dtype: torch.dtype) -> Trace:
    """Return the trace of a layer. Its states are as wide as the inputs of its attention; in MobileBERT, as those of
    another of its linear layers.
    """
    inputs = {module.in_features: None for module in layer.modules() if isinstance(module, nn.Linear)}
    forms = [replace(form, in_rows=False), form] if STARTS in form.tensors else [form]
    if TABLES in form.tensors:  # what has the name of cos and sin may be one tensor
        forms += [replace(each, table_dtype=None, one_table=True) for each in forms]
    failed = UntraceableError("a linear layer takes another number of inputs")
    for width, each in product({width_of(attention): None} | inputs, forms):
        trace = Trace(dtype, attention=ATTENTION_NAME)
        trace.may_return_weights = True
        try:
            trace.layer(layer, width, each)
        except WidthError:
            continue
        except UntraceableError as error:
            failed = error if each is forms[0] else failed
            if each is forms[-1]:
                raise failed from None
            continue
        return trace
    raise failed


def width_of(given: nn.Module) -> int:
    """Return the size of the hidden states that a module is given: the inputs of its first product."""
    for module in given.modules():
        if isinstance(module, nn.Linear):
            return int(module.in_features)
    raise UntraceableError("it has no linear layer")


def _stacks(
    model: nn.Module, dtype: torch.dtype, layers: Mapping[nn.Module, EncoderLayerCalls]
) -> Iterator[FusedSite]:
    """The modules around lists of layers of which all are known, whose code does nothing but call them."""
    for name, module in modules_by_name(model):
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child)]
        if len(lists) != 1 or not layers.keys() >= set(lists[0]) or has_own_forward(module):
            continue
        try:
            StackTrace(dtype, layers).stack(module, width_of(module), usual_form(type(module), others=INPUTS))
        except UntraceableError:
            continue
        leaves_padding = all(layers[layer].leaves_padding for layer in lists[0])
        readers = layers[lists[0][0]].readers if leaves_padding else None
        yield FusedSite(name, module, STACK, EncoderForward, EncoderStackCalls(readers))
