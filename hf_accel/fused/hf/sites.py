"""The places of a model that get native calls, and the reasons of the others. The model is read, never written to."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ...attention import AttentionSpec
from ...attention.hf import ATTENTION_NAME
from ...attention.hf.latents import is_known_expansion
from ...cache.hf.cache_argument import CACHE_NAME
from ...cache.hf.encoder_decoder import RaggedEncoderDecoderCache
from ...hardware import UNLIMITED
from ...kernels.cpu.library import FLOATS
from ...linear.experts import holds_experts, is_mixture
from ...linear.gates import tried_gate
from ...linear.hf import experts_refusal
from ...models import is_within, modules_by_name
from ...recognition.call_form import STARTS, parameter_names, usual_pass
from ...recognition.code import siblings
from ...recognition.complex_rotation import rotates_by_complex
from ...recognition.known_modules import known_module
from ...recognition.linear_code import is_plain_conv1d, is_plain_linear, rounds_its_bias_apart
from ...recognition.operation import INPUT, Span, UntraceableError
from ...recognition.operator_code import attends_by_operators
from ...recognition.row_convolution import is_pointwise
from ...recognition.trace import Trace
from ...recognition.trial import RandomNumbers, Tolerance, agree, seems_rms_norm, unwatched_twin
from ...recognition.unchanged import has_own_forward
from ...recognition.window_products import convolution_layer
from ...undo.journal import mixed_class, original_class
from ...undo.state import FUSED
from ..composed_activation import NativeActivation, composed_activation
from ..convolution_layers import ConvolutionState, NativeConvolutionLayer
from ..float_experts import ExpertsState, NativeExperts
from ..joined_layer import joins, refuse_others
from ..kept_states import Keepers
from ..layer_tail import split
from ..modules import (
    FusedGate,
    GatedCall,
    NativeGatedMLP,
    NativeRotary,
    has_library,
    rotary_form,
)
from ..native_operation import Planned
from ..norms import NativeNorm, NormForms, norm_form
from ..operations import refuse_without_kernel
from ..projections import (
    NativeConv1D,
    NativeLinear,
    NativePointwise,
    PatchProduct,
    ProjectionCall,
    is_readable,
    native_rows,
    takes_patches,
)
from ..routers import NativeRouter, RouterState, multiplies_by_its_weight, seems_router
from ..site import Dropped, FusedSite, SiteKind
from .decoder_calls import DecoderCalls, readers_without_head
from .joined_calls import JoinedCalls
from .layer_attention import attention_of, heads_of_keys, source_attention
from .layer_calls import LayerCalls, TracedForward
from .layer_sizes import called_parts, layer_width, rotated_size
from .native_calls import NativeCalls

NORM = SiteKind("norm", "RMSNorms", "one native call")
ROTARY = SiteKind("rotary", "rotary embeddings", "one native call")
MLP = SiteKind("mlp", "gated MLPs", "one call, then down", computes_all=True)
GATE = SiteKind("gate", "gated MLPs", "activation and product in one call")
ACTIVATION = SiteKind("activation", "activations", "one native call", computes_all=True)
LINEAR = SiteKind("linear")
PATCHES = SiteKind("patches", "patch embeddings", "one product", "each is given patches as large as its kernel")
CONVOLUTIONS = SiteKind(
    "convolutions", "convolutions", "one product of windows each, with what follows", multiplies=True
)
EXPERTS = SiteKind("experts", "float experts", "one native call", multiplies=True)
FEW_EXPERTS = replace(EXPERTS, varies="many rows of float experts go to torch, which rounds otherwise")
ROUTER = SiteKind(
    "router", "routers", "one native product", "their code multiplies by a weight of their own", multiplies=True
)
FEW_ROUTER = replace(ROUTER, varies="many rows of routers go to torch, which rounds otherwise")
DIFFERS = "the native call differs from the module's own result on random input"


@dataclass(frozen=True)
class ProjectionSite:
    """Linear layers of one parent that are called on one tensor."""

    parent: str
    layers: tuple[str, ...]  # names within the model


def fused_sites(
    model: nn.Module, dtype: torch.dtype, float_rows: int, *, all_rows: bool = False, device_type: str = "cpu"
) -> tuple[list[FusedSite], list[Dropped]]:
    """Find norms, rotary embeddings, activations and gated MLPs for native calls, which are checked on random input of
    `dtype`.

    all_rows: whether any number of rows of experts is multiplied natively, faster or not.
    """
    sites: list[FusedSite] = []
    dropped: list[Dropped] = []
    checked: dict[Any, bool] = {}  # by what the check depends on
    packed = any(STARTS in parameter_names(type(module).forward) for module in model.modules())
    for name, module in modules_by_name(model):
        site = _candidate(name, module, dtype, float_rows, all_rows=all_rows, device_type=device_type)
        if site is not None and site.kind == PATCHES and not packed:  # others are given whole images
            continue
        found = None if site is None else _checked(site, dtype, device_type, checked=checked)
        if isinstance(found, FusedSite):
            sites.append(found)
        elif found is not None:
            dropped.append(found)
    with_activation = [site.state for site in sites if isinstance(site.state, GatedCall | ConvolutionState)]
    held = [state.activation[1] for state in with_activation if state.activation]
    return [site for site in sites if site.kind != ACTIVATION or site.module not in held], dropped


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
    if isinstance(site.state, GatedCall):
        parts = site.state
        signature = (type(module), parts.gate, parts.up, parts.down, parts.epilogue)
        if signature not in checked:
            checked[signature] = _agrees(site, dtype, device_type)
        return site if checked[signature] else Dropped(name, site.kind, DIFFERS)
    if site.kind == NORM and norm_form(module, device_type=device_type) is None:
        return Dropped(name, site.kind, DIFFERS)
    if isinstance(site.state, ExpertsState):
        reason = experts_refusal(module)
        if reason is None and tried_gate(module, original_class(module)) is None:
            reason = "what they do between their weights is not known"
        return site if reason is None else Dropped(name, site.kind, reason)
    return site


def _candidate(
    name: str, module: nn.Module, dtype: torch.dtype, float_rows: int, *, all_rows: bool, device_type: str
) -> FusedSite | None:
    """Return a site of the kind that a module seems to be, by its name and its code."""
    if seems_rms_norm(module):
        return FusedSite(name, module, NORM, NativeNorm, NormForms())
    if rotary_form(module, dtype, device_type) is not None:
        return FusedSite(name, module, ROTARY, NativeRotary, None)
    if type(module) in (nn.Conv2d, nn.Conv3d) and device_type == "cpu" and takes_patches(vars(module)):
        return FusedSite(name, module, PATCHES, PatchProduct, None)
    convolves = convolution_layer(module) if has_library(device_type) else None
    if convolves is not None:
        return FusedSite(name, module, CONVOLUTIONS, NativeConvolutionLayer, ConvolutionState(convolves, module))
    if device_type == "cpu" and has_library(device_type) and holds_experts(module):
        by_inputs = bool(vars(module).get("is_transposed"))
        rows = UNLIMITED if all_rows else native_rows(dtype, by_inputs=by_inputs)
        return FusedSite(
            name, module, EXPERTS if rows == UNLIMITED else FEW_EXPERTS, NativeExperts, ExpertsState(rows)
        )
    if device_type == "cpu" and has_library(device_type) and seems_router(module):
        kind = ROUTER if float_rows == UNLIMITED else FEW_ROUTER
        known = multiplies_by_its_weight(module)
        return FusedSite(name, module, kind, NativeRouter, RouterState(float_rows)) if known else None
    form = composed_activation(module, dtype) if has_library(device_type) else None
    if form is not None:
        return FusedSite(name, module, ACTIVATION, NativeActivation, form)
    parts = GatedCall.of(module, float_rows)
    kind, mixin = (MLP, NativeGatedMLP) if has_library(device_type) else (GATE, FusedGate)
    return None if parts is None else FusedSite(name, module, kind, mixin, parts)


def native_linears(model: nn.Module, float_rows: int, rows_by_inputs: int) -> Iterator[FusedSite]:
    """Find plain float Linears and Conv1Ds whose weight a native call can read in place.

    float_rows, rows_by_inputs: the most rows that are multiplied natively, by weights [out, in] and [in, out].
    """
    for name, module in modules_by_name(model):
        plain = is_plain_linear(module) and not rounds_its_bias_apart(module)
        if plain and not has_own_forward(module) and is_readable(module):
            yield FusedSite(name, module, LINEAR, NativeLinear, ProjectionCall(float_rows))
        if is_plain_conv1d(module) and not has_own_forward(module) and is_readable(module, by_inputs=True):
            yield FusedSite(name, module, LINEAR, NativeConv1D, ProjectionCall(rows_by_inputs))
        known = known_module(module)
        for last in () if known is None else known[0].products:
            inner: Any = module._modules[last]
            if is_pointwise(inner) and not has_own_forward(inner) and is_readable(inner):
                yield FusedSite(f"{name}.{last}", inner, LINEAR, NativePointwise, ProjectionCall(float_rows))


def projection_sites(model: nn.Module) -> Iterator[ProjectionSite]:
    """Find linear layers that their parent calls on one tensor."""
    for name, module in modules_by_name(model):
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
    vars(fused)[FUSED] = replace(parts, call=ProjectionCall(1, parts.epilogue))
    fused.__class__ = mixed_class(site.mixin, kind)
    return agree(
        lambda: kind.forward(stock, x),
        lambda: torch.cat([fused(row[None]) for row in x]),
        Tolerance(of_largest=8 * torch.finfo(dtype).eps),
    )


@torch.no_grad()
def _small_linear(size: tuple[int, int], numbers: RandomNumbers) -> nn.Linear:
    outputs, inputs = size
    layer = nn.Linear(inputs, outputs, device="meta")  # takes none of the user's random numbers
    for name, parameter in [*layer._parameters.items()]:
        layer._parameters[name] = nn.Parameter(numbers(*parameter.shape) * inputs**-0.5)  # type: ignore[union-attr]
    return layer


# -- whole decoder layers: their code is run once with stand-ins ---------------------------------------

KIND = SiteKind("layer", "decoder layers", "one native call each", else_choice="module by module")
WITH_EXPERTS = replace(KIND, choice="one call, then experts")
JOINED = SiteKind("joined layer")  # one on a GPU
JOINS = {"rope": "rotation with the write of K and V", "add": "sum with the norm behind it"}  # for the plan


def _spec_of(trace: Trace, attention: Mapping[nn.Module, AttentionSpec]) -> AttentionSpec:
    """Return the spec of a trace's attention to the tokens of its own sequence."""
    modules = [each for operation in trace.operations if operation.kind == "attend" for each in operation.modules]
    if len(modules) != 1 or modules[0] not in attention:
        raise UntraceableError("it does not attend over the cache")
    return attention[modules[0]]


def _adds_bias(known: Any) -> bool:
    """Return whether a module adds a bias of positions that its model makes. known: an OperatorAttention, or None."""
    return known is not None and known.spec is not None and known.spec.bias


def _trace_for(
    config: Any, dtype: torch.dtype, attention: Mapping[nn.Module, AttentionSpec],
    *, inner: nn.Module | None, known: Any, device_type: str,
) -> Trace:  # fmt: skip
    """Return a trace for a decoder layer. inner: the module of it that attends over pages; None if none does. known:
    the OperatorAttention of it, or None.
    """
    size = None if inner is None else rotated_size(config, inner, attention[inner])
    # Code that attends by operators goes on seeing which function its config names.
    by_operators = inner is not None and attends_by_operators(type(inner))  # type: ignore[arg-type]
    named = None if by_operators else ATTENTION_NAME
    trace = Trace(dtype, attention=named, table_size=size, device=torch.device(device_type))
    trace.tried, trace.masks_biased = known is not None, known is not None and known.masks_biased
    trace.heads_of = lambda each: heads_of_keys(attention[each]) if each in attention else None
    return trace


def layer_sites(
    model: nn.Module, dtype: torch.dtype, keepers: Keepers,
    *, linears: Container[nn.Module] | None, device_type: str = "cpu",
) -> tuple[list[FusedSite], list[Dropped]]:  # fmt: skip
    """Find decoder layers of which every operation is known, and give the reason for the others.

    linears: the linear layers that the native kernels compute; None on a GPU, where a layer needs operations that
    share a launch.
    """
    attention, tried, states = keepers
    sites: list[FusedSite] = []
    dropped: list[Dropped] = []
    first_norms: dict[str, nn.Module] = {}  # the first norm of each layer whose first operation is one
    layers: list[str] = []
    readers = readers_without_head(model)
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    for name, module in modules_by_name(model):
        parts = called_parts(module) if name.rpartition(".")[2].isdecimal() else module.children()
        inner = [child for child in parts if child in attention]
        has_states = any(child in states for child in module.children())
        if not (inner or has_states) or has_own_forward(module) or any(is_within(name, layer) for layer in layers):
            continue
        layers.append(name)
        try:
            attends = inner[0] if inner else None
            known = None if attends is None else tried.get(attends)
            trace = _trace_for(model.config, dtype, attention, inner=attends, known=known, device_type=device_type)
            trace.cache_class = RaggedEncoderDecoderCache if has_encoder else None
            if linears is not None:
                trace.is_called, trace.states_of, trace.expands = is_mixture, states.get, is_known_expansion
            form = usual_pass(type(module), cache=CACHE_NAME, has_encoder=has_encoder, has_bias=_adds_bias(known))
            trace.decoder_layer(
                module, layer_width(module, model.config), replace(form, one_table=rotates_by_complex(module))
            )
            if inner:
                attention_of(trace, _spec_of(trace, attention))
            source_attention(trace, attention.get)
            if linears is None:
                refuse_others(trace)
            split(trace.operations, trace.widths)
            refuse_without_kernel(trace.operations, Planned(dtype, linears, device_type))
            joined = joins(trace.operations) if linears is None else None
            if joined is not None and not joined:
                raise UntraceableError("none of its steps can share a launch")
        except UntraceableError as error:
            dropped.append(Dropped(name, KIND, str(error)))
            continue
        whole = KIND if all(operation.kind != "module" for operation in trace.operations) else WITH_EXPERTS
        calls: LayerCalls[Any] = NativeCalls() if has_states else DecoderCalls(readers)
        kind, calls = (whole, calls) if joined is None else (JOINED, JoinedCalls(joined))
        sites.append(FusedSite(name, module, kind, TracedForward, calls))
        first = trace.operations[0]
        if first.kind == "norm" and first.inputs == [Span(INPUT, 0, trace.widths[INPUT])]:
            first_norms[name] = first.modules[0]
    for site in sites:
        place, _, number = site.name.rpartition(".")
        if site.kind == JOINED and number.isdecimal():
            site.state.following = first_norms.get(f"{place}.{int(number) + 1}")
    return sites, dropped
