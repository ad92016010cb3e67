"""Decoder layers of transformers that run as one native call over pages, and the plan of which ones do."""

from __future__ import annotations

from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from ..attention import AttentionSpec, PlannedAttention
from ..attention.cpu import CpuBackend
from ..attention.hf.forward import KNOWN_KEYWORDS, NAME, NOT_OURS, window_of
from ..cache.hf.handle import CacheOverPages, LayerOverPages
from ..instance import Mixin
from ..kernels.cpu.library import native
from ..state import BACKEND_ATTRIBUTE, FUSED
from .forms import ROTATION
from .layer_programme import Attention, LayerProgramme, refuse_without_kernel
from .sites import Dropped, FusedSite
from .stand_ins import SCALARS, TENSORS, Read, UntraceableError
from .traced import Operation, Trace

KIND = "layer"
USUAL_ARGUMENTS = dict.fromkeys(TENSORS, True) | {"use_cache": True}  # what transformers' models give a layer


def layer_sites(
    model: nn.Module, dtype: torch.dtype, float_rows: int, *, attention: dict[int, AttentionSpec], linears: set[int]
) -> tuple[list[FusedSite], list[Dropped]]:
    """Decoder layers that are known to the last step, and those that are not, with the reason.

    attention: the specs of attention modules that the native kernels serve, by the module's id. linears: the ids of
    linear layers that they multiply by.
    """
    sites: list[FusedSite] = []
    dropped: list[Dropped] = []
    for name, module in model.named_modules():
        inner = [child for child in module.children() if id(child) in attention]
        if len(inner) != 1 or not _rotates(inner[0]) or "forward" in vars(module):  # by accelerate, or by hand
            continue
        try:
            trace = Trace(dtype, float_rows, attention=NAME)
            trace.layer(module, _width(module), **USUAL_ARGUMENTS)
            _attention_of(trace, attention[id(inner[0])])
            refuse_without_kernel(trace, linears)
            _refuse_partial_rotation(model.config)
        except UntraceableError as error:
            dropped.append(Dropped(name, KIND, str(error)))
        else:
            sites.append(FusedSite(name, module, KIND, NativeLayer, LayerCalls(float_rows)))
    return sites, dropped


def _rotates(attention: nn.Module) -> bool:
    code = getattr(type(attention).forward, "__code__", None)
    return code is not None and ROTATION in code.co_names


def _refuse_partial_rotation(config: Any) -> None:
    """Raise UntraceableError if the rotation leaves some numbers of a head as they are."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and each.get("partial_rotary_factor", 1.0) != 1.0:
            raise UntraceableError("its rotation leaves numbers as they are")


def _width(layer: nn.Module) -> int:
    """The size of the hidden states that a layer takes: that of its first norm."""
    for module in layer.children():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 1:
            return int(weight.shape[0])
    raise UntraceableError("it has no norm")


def _attention_of(trace: Trace, spec: AttentionSpec) -> Attention:
    """What the trace's attention computes, by the rules of our attention function; it must be what was planned."""
    operation: Operation = next(o for o in trace.operations if o.kind == "attend")
    (module,), values = operation.modules, operation.values
    options: dict[str, Any] = values["options"]
    unknown = [n for n, value in options.items() if n not in KNOWN_KEYWORDS and value is not None]
    used = [n for n in NOT_OURS if options.get(n)]
    if unknown or used:
        raise UntraceableError(f"its attention is given {(unknown + used)[0]}=")
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
        trace.note(vars(module), "is_causal", vars(module).get("is_causal"))
    scale, softcap = options.get("scaling"), options.get("softcap")
    dim = values["dim"]
    planned = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.softcap, spec.sinks)
    if not isinstance(scale, (int, float, NoneType)):
        raise UntraceableError("it scales by more than a number")
    if planned != (values["heads"], values["kv_heads"], dim, values["value_dim"], softcap, False) or not causal:
        raise UntraceableError("its attention is not the one that was planned")
    return Attention(dim**-0.5 if scale is None else scale, softcap, spec.window)


class NativeLayer(Mixin):
    """Mixed into a decoder layer: a pass of few tokens over pages is one native call; all else runs its own code."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[B, Q, hidden] -> [B, Q, hidden]."""
        calls: LayerCalls = self.__dict__[FUSED]
        result = calls.run(self, args, kwargs)  # type: ignore[arg-type]
        return super().forward(*args, **kwargs) if result is None else result  # type: ignore[misc]


class LayerCalls:
    """The programme of one layer, made when it is first called, and made again when what it depends on has changed.

    A copy or a pickle starts without it, because it holds addresses.
    """

    def __init__(self, float_rows: int) -> None:
        self.float_rows = float_rows
        self.dtypes: tuple[torch.dtype, torch.dtype] | None = None  # of the input and the tables that were traced
        self.names: frozenset[str] = frozenset()  # of the arguments of that call
        self.tensors: frozenset[str] = frozenset()  # those of TENSORS that were not None
        self.plain: dict[str, Any] = {}  # and those that were plain values
        self.reads: list[Read] = []  # what the trace depended on, if there is no programme
        self.programme: LayerProgramme | None = None

    def __reduce__(self) -> Any:
        return LayerCalls, (self.float_rows,)

    def run(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | tuple[Tensor] | None:
        """The layer's result; None where its own code must run."""
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, CacheOverPages) or len(args) != 1 or not native(args[0]):
            return None
        x, tables = args[0], kwargs.get("position_embeddings")
        if type(tables) is not tuple or list(map(type, tables)) != [Tensor, Tensor]:
            return None
        if output_capturing._active_collector.get():
            return None
        programme = self._ready(layer, x, tables, kwargs)
        if programme is None or not programme.is_unobserved():
            return None
        known, window = window_of(kwargs.get("attention_mask"))
        pages = cache.layers[programme.layer_idx]
        if not known or not isinstance(pages, LayerOverPages) or window != pages.group.window:
            return None
        if pages.group.context is not None:
            return None  # one call cannot wait for other ranks in its middle
        whole = pages.prepared_step()
        if whole is None or not whole.contiguous[pages.group_index]:
            return None
        step = whole.groups[pages.group_index]
        if step.written is not None or window != programme.attention.window:
            return None
        # With padding, there are fewer tokens than columns.
        if not programme.takes(x, *tables, tokens=len(step.slots)):
            return None
        storage = pages.group.storage(programme.layer_idx, *programme.written)
        if not programme.fits(storage):
            return None
        out = programme(x, *tables, storage=storage, step=step)
        pages.pass_done(whole)
        return (out,) if programme.returns_tuple else out

    def _ready(
        self, layer: nn.Module, x: Tensor, tables: tuple[Tensor, Tensor], kwargs: dict[str, Any]
    ) -> LayerProgramme | None:
        dtypes, programme = (x.dtype, tables[0].dtype), self.programme
        tensors = frozenset(name for name in TENSORS if kwargs.get(name) is not None)
        same = dtypes == self.dtypes and kwargs.keys() == self.names and tensors == self.tensors
        if same and all(_is_same(kwargs[name], value) for name, value in self.plain.items()):
            if programme is not None and programme.is_current():
                return programme
            if programme is None and all(read.owner.get(read.name) is read.value for read in self.reads):
                return None  # what could not be traced has not changed since
        self.dtypes, self.names, self.tensors = dtypes, frozenset(kwargs), tensors
        self.plain = {name: value for name, value in kwargs.items() if name not in TENSORS}
        self.programme = self._make(layer, x, tables[0].dtype, kwargs)
        return self.programme

    def _make(
        self, layer: nn.Module, x: Tensor, table_dtype: torch.dtype, kwargs: dict[str, Any]
    ) -> LayerProgramme | None:
        trace = Trace(x.dtype, self.float_rows)
        try:
            if not all(isinstance(value, SCALARS) for value in self.plain.values()):
                raise UntraceableError("it is given more than plain values")
            trace.layer(layer, x.shape[-1], **kwargs)
            (module,) = next(o.modules for o in trace.operations if o.kind == "attend")
            planned: PlannedAttention | None = vars(module).get(BACKEND_ATTRIBUTE)
            trace.note(vars(module), BACKEND_ATTRIBUTE, planned)
            if planned is None or not isinstance(planned.backend, CpuBackend):
                raise UntraceableError("its attention has another backend")
            spec = replace(planned.spec, dtype=x.dtype)
            if planned.backend.refuses(spec) is not None:
                raise UntraceableError("its attention has another backend")
            return LayerProgramme(trace, table_dtype, _attention_of(trace, spec))
        except UntraceableError:
            self.reads = trace.reads
            return None


def _is_same(value: object, traced: object) -> bool:
    """Whether an argument is the plain value that it was."""
    return value is traced or (type(value) is type(traced) and isinstance(value, SCALARS) and value == traced)
