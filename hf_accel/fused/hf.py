"""Decoder layers of transformers that run by their trace over pages, and the plan of which ones do.

On the CPU such a layer is one native call; on a GPU some of its operations share a launch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from ..attention import AttentionSpec, PlannedAttention
from ..attention.cpu import CpuBackend
from ..attention.hf.forward import ATTENTION_NAME, KNOWN_KEYWORDS, NOT_OURS, attention_forward
from ..attention.hf.mask import window_of
from ..cache.group import KVStorage, Step
from ..cache.hf.handle import CacheOverPages, LayerOverPages, PagedKV
from ..kernels.cpu.decoder_layer import INPUT
from ..kernels.cpu.library import native
from ..recognition.stand_ins import PLAIN_TYPES, TENSORS, Span, UntraceableError
from ..recognition.unchanged import Read, has_own_forward
from ..undo.instance import Mixin
from ..undo.state import BACKEND_ATTRIBUTE, FUSED
from .forms import ROTATION, by_library, computes
from .joined_layer import JoinedLayer, joins
from .layer_programme import LayerProgramme
from .sites import Dropped, FusedSite
from .traced import Operation, Trace
from .traced_layer import Attention, TracedLayer, refuse_without_kernel

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
            _attention_of(trace, attention[inner[0]])
            refuse_without_kernel(trace, linears, device_type)
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
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
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


def _attention_of(trace: Trace, spec: AttentionSpec) -> Attention:
    """Return the trace's attention by the rules of our attention function; it must be the planned one."""
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


class TracedForward(Mixin):
    """Is mixed into a decoder layer. A pass over pages runs the layer's trace; other calls run its own code."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[B, Q, hidden] -> [B, Q, hidden]."""
        calls: LayerCalls[Any] = self.__dict__[FUSED]
        result = calls.run(self, args, kwargs)  # type: ignore[arg-type]
        return super().forward(*args, **kwargs) if result is None else result  # type: ignore[misc]


class PassPlace(NamedTuple):
    """The place where a pass writes K and V of a layer, and reads them. step: the Step of all groups of layers."""

    pages: LayerOverPages
    storage: KVStorage
    step: Step


Layer = TypeVar("Layer", bound=TracedLayer)


class LayerCalls(ABC, Generic[Layer]):
    """The traced layer of one module.

    It is made at the first call, and again when something that it depends on has changed.

    A copy or a pickle starts without it, because it may hold addresses.
    """

    float_rows = 0
    computes: Callable[[object], bool]  # whether it is for this input

    def __init__(self) -> None:
        self.kinds: tuple[object, ...] = ()  # the dtypes of the input and the tables that were traced, and the device
        self.names: frozenset[str] = frozenset()  # of the arguments of that call
        self.tensors: frozenset[str] = frozenset()  # those of TENSORS that were not None
        self.plain: dict[str, Any] = {}  # and those that were plain values
        self.reads: list[Read] = []  # the reads of the trace, if there is no programme
        self.programme: Layer | None = None

    @abstractmethod
    def make(self, trace: Trace, planned: PlannedAttention, *, x: Tensor, table_dtype: torch.dtype) -> Layer:
        """Make the object that computes the layer. Raises UntraceableError if it cannot be made."""

    @abstractmethod
    def compute(self, programme: Layer, x: Tensor, kwargs: dict[str, Any], place: PassPlace) -> Tensor:
        """Compute the layer's result, and write K and V."""

    def run(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | tuple[Tensor] | None:
        """Return the layer's result; None if its own code must run."""
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, CacheOverPages) or len(args) != 1 or not self.computes(args[0]):
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
        out = self.compute(programme, x, kwargs, PassPlace(pages, storage, whole))
        pages.pass_done(whole)
        return (out,) if programme.returns_tuple else out

    def _ready(
        self, layer: nn.Module, x: Tensor, tables: tuple[Tensor, Tensor], kwargs: dict[str, Any]
    ) -> Layer | None:
        kinds, programme = (x.dtype, tables[0].dtype, x.device), self.programme
        tensors = frozenset(name for name in TENSORS if kwargs.get(name) is not None)
        same = kinds == self.kinds and kwargs.keys() == self.names and tensors == self.tensors
        if same and all(_is_same(kwargs[name], value) for name, value in self.plain.items()):
            if programme is not None and programme.is_current():
                return programme
            if programme is None and all(read.owner.get(read.name) is read.value for read in self.reads):
                return None  # a layer that could not be traced has not changed since
        self.kinds, self.names, self.tensors = kinds, frozenset(kwargs), tensors
        self.plain = {name: value for name, value in kwargs.items() if name not in TENSORS}
        self.programme = self._make(layer, x, tables[0].dtype, kwargs)
        return self.programme

    def _make(self, layer: nn.Module, x: Tensor, table_dtype: torch.dtype, kwargs: dict[str, Any]) -> Layer | None:
        trace = Trace(x.dtype, self.float_rows)
        try:
            if not all(isinstance(value, PLAIN_TYPES) for value in self.plain.values()):
                raise UntraceableError("it is given more than plain values")
            trace.layer(layer, x.shape[-1], **kwargs)
            (module,) = next(o.modules for o in trace.operations if o.kind == "attend")
            planned: PlannedAttention | None = vars(module).get(BACKEND_ATTRIBUTE)
            trace.note(vars(module), BACKEND_ATTRIBUTE, planned)
            if planned is None:
                raise UntraceableError("its attention has another backend")
            return self.make(trace, planned, x=x, table_dtype=table_dtype)
        except UntraceableError:
            self.reads = trace.reads
            return None


class NativeCalls(LayerCalls[LayerProgramme]):
    """The LayerCalls of a layer on the CPU: one native call for a pass of few tokens."""

    computes = staticmethod(native)

    def __init__(self, float_rows: int) -> None:
        super().__init__()
        self.float_rows = float_rows

    def __reduce__(self) -> Any:
        return NativeCalls, (self.float_rows,)

    def make(self, trace: Trace, planned: PlannedAttention, *, x: Tensor, table_dtype: torch.dtype) -> LayerProgramme:
        spec = replace(planned.spec, dtype=x.dtype)
        if not isinstance(planned.backend, CpuBackend) or planned.backend.refuses(spec) is not None:
            raise UntraceableError("its attention has another backend")
        return LayerProgramme(trace, table_dtype, _attention_of(trace, spec))

    def compute(self, programme: LayerProgramme, x: Tensor, kwargs: dict[str, Any], place: PassPlace) -> Tensor:
        step = place.step.groups[place.pages.group_index]
        return programme(x, *kwargs["position_embeddings"], storage=place.storage, step=step)


class JoinedCalls(LayerCalls[JoinedLayer]):
    """The LayerCalls of a layer on a GPU.

    joined: the operations of JOINS that share a launch. following: see JoinedLayer.
    """

    computes = staticmethod(computes)

    def __init__(self, joined: frozenset[str], following: nn.Module | None = None) -> None:
        super().__init__()
        self.joined, self.following = joined, following

    def __reduce__(self) -> Any:
        return JoinedCalls, (self.joined, self.following)

    def make(self, trace: Trace, planned: PlannedAttention, *, x: Tensor, table_dtype: torch.dtype) -> JoinedLayer:
        if by_library(x):  # the model was moved to a CPU since
            raise UntraceableError("its steps share launches on a GPU alone")
        attention = _attention_of(trace, replace(planned.spec, dtype=x.dtype))
        return JoinedLayer(trace, table_dtype, attention, device=x.device, following=self.following)

    def compute(self, programme: JoinedLayer, x: Tensor, kwargs: dict[str, Any], place: PassPlace) -> Tensor:
        pages, storage, whole = place
        step, mask = whole.groups[pages.group_index], kwargs.get("attention_mask")

        def attend(module: nn.Module, heads: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> Tensor:
            q, k, v = heads
            paged = PagedKV(pages, storage, whole, step, True, v)
            return attention_forward(module, q, paged.attach(k), v, mask, **options)[0]

        tables = kwargs["position_embeddings"]
        return programme(x, tables, storage=storage, slots=step.slots, attend=attend)


def _is_same(value: object, traced: object) -> bool:
    """Return whether an argument is the plain value that it was."""
    return value is traced or (type(value) is type(traced) and isinstance(value, PLAIN_TYPES) and value == traced)
