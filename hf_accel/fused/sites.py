"""The places of a model that get native calls, and the reasons of the others. The model is read, never written to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..kernels.cpu.library import FLOATS
from ..recognition.source import siblings
from ..recognition.trial import RandomNumbers, Tolerance, agree, unwatched_twin
from ..recognition.unchanged import has_own_forward
from ..undo.journal import Mixin, mixed_class
from ..undo.state import FUSED
from .forms import GatedNames, gated_names, has_library, norm_form, rotary_form
from .modules import FusedGate, NativeGatedMLP, NativeNorm, NativeRotary, NormForms
from .projections import NativeLinear, ProjectionCall, is_readable
from .widened import WidenedConv1D, is_conv1d, is_slow_in_torch

DIFFERS = "the native call differs from the module's own result on random input"


@dataclass(frozen=True)
class FusedSite:
    """A module that gets a class of its own.

    kind: its name in the plan. state: the values that the mixin reads, by attribute.
    """

    name: str
    module: nn.Module
    kind: str
    mixin: type[Mixin]
    state: Any


@dataclass(frozen=True)
class ProjectionSite:
    """Linear layers of one parent that are called on one tensor."""

    parent: str
    layers: tuple[str, ...]  # names within the model


@dataclass(frozen=True)
class Dropped:
    """A module that looked like a candidate, and the reason why it keeps its own forward."""

    name: str
    kind: str
    reason: str


def fused_sites(
    model: nn.Module, dtype: torch.dtype, float_rows: int, *, device_type: str = "cpu"
) -> tuple[list[FusedSite], list[Dropped]]:
    """Find norms, rotary embeddings and gated MLPs for native calls, which are checked on random input of `dtype`."""
    sites: list[FusedSite] = []
    dropped: list[Dropped] = []
    checked: dict[Any, bool] = {}  # by what the check depends on
    for name, module in model.named_modules():
        site = _candidate(name, module, dtype, float_rows, device_type=device_type)
        found = None if site is None else _checked(site, dtype, device_type, checked=checked)
        if isinstance(found, FusedSite):
            sites.append(found)
        elif found is not None:
            dropped.append(found)
    return sites, dropped


def _checked(
    site: FusedSite, dtype: torch.dtype, device_type: str, *, checked: dict[Any, bool]
) -> FusedSite | Dropped:
    name, module = site.name, site.module
    if has_own_forward(module):
        return Dropped(name, site.kind, "its forward was replaced on the module itself")
    if is_parametrized(module):  # which is taken off by setting the module's class
        return Dropped(name, site.kind, "a parametrization computes its parameters")
    used = {p.dtype for p in module.parameters(recurse=False)} or {dtype}
    if unknown := used.difference(FLOATS):
        named = ", ".join(sorted(str(d).removeprefix("torch.") for d in unknown))
        return Dropped(name, site.kind, f"the native call does not compute in {named}")
    if isinstance(site.state, GatedNames):
        parts = site.state
        signature = (type(module), parts.gate, parts.up, parts.down, parts.call.epilogue)
        if signature not in checked:
            checked[signature] = _agrees(site, dtype, device_type)
        return site if checked[signature] else Dropped(name, site.kind, DIFFERS)
    if site.kind == "norm" and norm_form(module) is None:
        return Dropped(name, site.kind, DIFFERS)
    if site.kind == "conv1d":
        if type(module) not in checked:
            checked[type(module)] = _multiplies_equally(module, dtype)
        return site if checked[type(module)] else Dropped(name, site.kind, DIFFERS)
    return site


def _candidate(
    name: str, module: nn.Module, dtype: torch.dtype, float_rows: int, *, device_type: str
) -> FusedSite | None:
    """Return the kind that a module seems to be by its name and its code."""
    if type(module).__name__.endswith("RMSNorm"):
        return FusedSite(name, module, "norm", NativeNorm, NormForms())
    if rotary_form(module, dtype, device_type) is not None:
        return FusedSite(name, module, "rotary", NativeRotary, None)
    if device_type == "cpu" and is_conv1d(module) and is_slow_in_torch(dtype):
        return FusedSite(name, module, "conv1d", WidenedConv1D, None)
    parts = gated_names(module, float_rows)
    kind, mixin = ("mlp", NativeGatedMLP) if has_library(device_type) else ("gate", FusedGate)
    return None if parts is None else FusedSite(name, module, kind, mixin, parts)


def native_linears(model: nn.Module, float_rows: int) -> Iterator[FusedSite]:
    """Find plain float Linears whose weight a native call can read in place."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not has_own_forward(module) and is_readable(module):
            yield FusedSite(name, module, "linear", NativeLinear, ProjectionCall(float_rows))


def projection_sites(model: nn.Module) -> Iterator[ProjectionSite]:
    """Find linear layers that their parent calls on one tensor."""
    for name, module in model.named_modules():
        for names in siblings(type(module).forward):
            layers = [getattr(module, child, None) for child in names]
            if all(isinstance(layer, nn.Linear) for layer in layers):
                prefix = f"{name}." if name else ""
                yield ProjectionSite(name, tuple(prefix + child for child in names))


def _agrees(site: FusedSite, dtype: torch.dtype, device_type: str) -> bool:
    """Return whether the fused forward gives the original's result, up to rounding, with small weights."""
    kind, parts, numbers = type(site.module), site.state, RandomNumbers()
    sizes = {parts.gate: (48, 32), parts.up: (48, 32), parts.down: (32, 48)}
    linears = {name: _small_linear(size, numbers).to(device_type, dtype) for name, size in sizes.items()}
    x = numbers(3, 32, dtype=dtype, device=device_type)
    stock, fused = unwatched_twin(site.module, _modules=linears), unwatched_twin(site.module, _modules=linears)
    vars(fused)[FUSED] = replace(parts, call=ProjectionCall(1, parts.call.epilogue))
    fused.__class__ = mixed_class(site.mixin, kind)
    return agree(
        lambda: kind.forward(stock, x),
        lambda: torch.cat([fused(row[None]) for row in x]),
        Tolerance(of_largest=8 * torch.finfo(dtype).eps),
    )


def _multiplies_equally(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a Conv1D gives the result of the product in float32, up to rounding, with small weights."""
    kind, numbers = type(module), RandomNumbers()
    weight, bias, x = (numbers(*shape, dtype=dtype) for shape in ((32, 48), (48,), (3, 32)))
    twin = unwatched_twin(module)
    twin._parameters = {"weight": nn.Parameter(weight, False), "bias": nn.Parameter(bias, False)}
    vars(twin).update(nx=32, nf=48)
    widened = unwatched_twin(twin)
    widened.__class__ = mixed_class(WidenedConv1D, kind)
    return agree(lambda: kind.forward(twin, x), lambda: widened(x), Tolerance(roundings=8, absolute=0.05))


@torch.no_grad()
def _small_linear(size: tuple[int, int], numbers: RandomNumbers) -> nn.Linear:
    outputs, inputs = size
    # takes none of the user's random numbers
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
    for parameter in layer.parameters():
        parameter.copy_(numbers(*parameter.shape) * inputs**-0.5)
    return layer
