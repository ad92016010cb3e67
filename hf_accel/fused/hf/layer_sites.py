"""The plan of which decoder layers run by their trace: of each, its code is run once with stand-ins."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...attention import AttentionSpec
from ...attention.hf.forward import ATTENTION_NAME
from ...kernels.cpu.decoder_layer import INPUT
from ...models import layers_config
from ...recognition.stand_ins import TENSORS, Span, UntraceableError
from ...recognition.unchanged import has_own_forward
from ..forms import ROTATION, form_of_rotation, norm_form
from ..joined_layer import joins
from ..sites import Dropped, FusedSite
from ..traced import Trace
from .layer_calls import JoinedCalls, NativeCalls, TracedForward, attention_of

KIND = "layer"
JOINED = "joined layer"  # the kind of one on a GPU
JOINS = {"rope": "rotation with the write of K and V", "add": "sum with the norm behind it"}  # for the plan
USUAL_ARGUMENTS = dict.fromkeys(TENSORS, True) | {
    "use_cache": True
}  # the arguments that transformers' models give a layer


def layer_sites(
    model: nn.Module, dtype: torch.dtype, float_rows: int, *,
    attention: Mapping[nn.Module, AttentionSpec], linears: Container[nn.Module],
) -> tuple[list[FusedSite], list[Dropped]]:  # fmt: skip
    """Find decoder layers of which every operation is known, and give the reason for the others.

    attention: the specs of the attention modules that the native kernels serve. linears: the linear layers that these
    kernels compute.
    """
    sites: list[FusedSite] = []
    dropped: list[Dropped] = []
    for name, module, found in _traces(model, dtype, float_rows, attention=attention, linears=linears):
        if isinstance(found, str):
            dropped.append(Dropped(name, KIND, found))
        else:
            sites.append(FusedSite(name, module, KIND, TracedForward, NativeCalls(float_rows)))
    return sites, dropped


def joined_sites(
    model: nn.Module, dtype: torch.dtype, *, attention: Mapping[nn.Module, AttentionSpec], device_type: str
) -> tuple[list[FusedSite], list[Dropped]]:
    """Find decoder layers on a GPU whose operations can share launches, and give the reason for the others.

    attention: the specs of the attention modules that attend over pages.
    """
    sites: list[FusedSite] = []
    dropped: list[Dropped] = []
    first_norms: dict[str, nn.Module] = {}  # the first norm of each layer whose first operation is one
    for name, module, found in _traces(model, dtype, 0, attention=attention, device_type=device_type):
        if isinstance(found, str):
            dropped.append(Dropped(name, KIND, found))
            continue
        sites.append(FusedSite(name, module, JOINED, TracedForward, JoinedCalls(joins(found.operations))))
        first = found.operations[0]
        if first.kind == "norm" and first.inputs == [Span(INPUT, 0, found.widths[INPUT])]:
            first_norms[name] = first.modules[0]
    for site in sites:
        place, _, number = site.name.rpartition(".")
        if number.isdecimal():
            site.state.following = first_norms.get(f"{place}.{int(number) + 1}")
    return sites, dropped


def _traces(
    model: nn.Module, dtype: torch.dtype, float_rows: int, *,
    attention: Mapping[nn.Module, AttentionSpec], linears: Container[nn.Module] | None = None,
    device_type: str = "cpu",
) -> Iterator[tuple[str, nn.Module, Trace | str]]:  # fmt: skip
    """The name of each decoder layer, the layer, and its trace; or why it has none, as a clause."""
    for name, module in model.named_modules():
        inner = [child for child in module.children() if child in attention]
        if len(inner) != 1 or not _rotates(inner[0]) or has_own_forward(module):
            continue
        try:
            trace = Trace(dtype, float_rows, attention=ATTENTION_NAME)
            trace.layer(module, _width(module), **USUAL_ARGUMENTS)
            attention_of(trace, attention[inner[0]])
            _refuse_without_kernel(trace, linears, device_type)
            _refuse_partial_rotation(model.config)
            if linears is None and not joins(trace.operations):
                raise UntraceableError("none of its steps can share a launch")
        except UntraceableError as error:
            yield name, module, str(error)
        else:
            yield name, module, trace


def _rotates(attention: nn.Module) -> bool:
    code = getattr(type(attention).forward, "__code__", None)
    return code is not None and ROTATION in code.co_names


def _refuse_partial_rotation(config: Any) -> None:
    """Raise UntraceableError if the rotation leaves some numbers of a head as they are."""
    parameters = getattr(layers_config(config), "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and each.get("partial_rotary_factor", 1.0) != 1.0:
            raise UntraceableError("its rotation leaves numbers as they are")


def _width(layer: nn.Module) -> int:
    """Return the size of a layer's hidden states, which is that of its first norm."""
    for module in layer.children():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 1:
            return int(weight.shape[0])
    raise UntraceableError("it has no norm")


def _refuse_without_kernel(trace: Trace, linears: Container[nn.Module] | None, device_type: str = "cpu") -> None:
    """Raise UntraceableError for what a TracedLayer would refuse in a layer that is still to be patched.

    linears: the linear layers that will have a native call; None where they are called as modules.
    """
    for operation in trace.operations:
        match operation.kind:
            case "linear" | "gated":
                if linears is not None and not all(module in linears for module in operation.modules):
                    raise UntraceableError("a linear layer has no native call")
            case "norm" if norm_form(operation.modules[0], dtype=trace.dtype) is None:
                raise UntraceableError("a norm has no native call")
            case "rope":
                function = operation.values["function"]
                if form_of_rotation(function, trace.dtype, trace.dtype, device_type) is None:
                    raise UntraceableError("its rotation has no native call")
