"""Decoder layers of transformers that run by their trace over pages.

On the CPU such a layer is one native call; on a GPU some of its operations share a launch. In each pass, each layer
checks that its trace is still right. If nothing can change within a pass, the first layer checks for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from ...attention import PlannedAttention
from ...attention.cpu import CpuBackend
from ...attention.hf.bias import table_of
from ...attention.hf.mask import window_of
from ...attention.hf.stock import ATTENTION_NAME
from ...cache.group import PageGroup
from ...cache.hf.encoder_decoder import RaggedEncoderDecoderCache, tokens_part
from ...cache.hf.layers import CacheOverPages, LayerOverPages
from ...cache.hf.ragged import SourceLayer
from ...cache.step import GroupStep, Step
from ...kernels.cpu.attention import NO_BIAS, position_bias_fields
from ...kernels.cpu.library import native
from ...kernels.layouts import PositionBias
from ...linear.adapters import PassAdapters
from ...linear.experts import is_mixture
from ...recognition.call_form import BIAS, CACHES, SOURCE_BIAS, SOURCE_STATES, TENSORS, bound, parameter_names
from ...recognition.operation import UntraceableError
from ...recognition.trace import Trace
from ...recognition.unchanged import Read, Surroundings, is_same_value
from ...undo.journal import Mixin, original_class
from ...undo.state import FUSED
from ..layer_programme import CallFields, LayerProgramme, SourceFields
from ..traced_layer import TracedLayer
from .layer_attention import (
    attend_of,
    attention_of,
    note_plan,
    operators_within,
    planned_attention,
    planned_source,
    source_attention,
)


class TracedForward(Mixin):
    """A mixin for a decoder layer. A pass over pages runs the layer's trace; other calls run its own code."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__dict__[FUSED].run(self, args, kwargs)
        if result is None:
            with PassAdapters.added_within(self):  # type: ignore[arg-type]
                result = super().forward(*args, **kwargs)  # type: ignore[misc]
        return result


# -- one pass ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LayerPlace:
    """The place where a pass writes K and V of the layers of one group, and what it gives to each of them.

    kwargs: the arguments of a layer's call, by name. kind: the `kind` of that layer. step: the Step of all groups.
    fields: the part of a native call that all layers of the group share; it is made with the first call. whole: the
    cache that also keeps keys of an encoder's output; None for one without. source_fields: as fields, of its pages.
    """

    kwargs: dict[str, Any]
    kind: tuple[object, ...]
    group: PageGroup
    step: Step
    group_step: GroupStep
    whole: RaggedEncoderDecoderCache | None = None
    fields: CallFields | None = None
    source_fields: SourceFields | None = None

    @property
    def tables(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin, [B or 1, T, head_dim]; None if the layer is given none."""
        return self.kwargs.get("position_embeddings")


class KnownPass:
    """A pass within which nothing can change. programmes: of the layers that need not be asked again.

    A layer that gets the output of the layer before it, and the same other arguments, has the same place.
    """

    def __init__(self, programmes: frozenset[TracedLayer]) -> None:
        self.programmes = programmes
        self.out: Tensor | None = None  # of the layer before
        self.places: dict[int, LayerPlace] = {}  # by the id of the mask, which the place keeps

    def place_of(self, calls: LayerCalls[Any], x: Tensor, kwargs: dict[str, Any]) -> LayerPlace | None:
        """Return the place of a layer before, if this layer has the same; None if this layer must be asked."""
        place = self.places.get(id(kwargs.get("attention_mask")))
        if place is None or x is not self.out or calls.programme not in self.programmes or calls.kind != place.kind:
            return None
        known = place.kwargs
        same = len(kwargs) == len(known) and all(map(is_, map(known.get, kwargs), kwargs.values()))
        return place if same else None

    def note(self, place: LayerPlace, out: Tensor) -> None:
        self.out = out
        self.places[id(place.kwargs.get("attention_mask"))] = place


class PassWatch:
    """Says at the beginning of a pass whether anything can change within it, and which layers are unchanged.

    Only code of others can change something: a hook on any module, a forward on a module, a module or a function that
    is not of a known package. A copy or a pickle of a watch has seen nothing.
    """

    def __init__(self) -> None:
        self._around: Surroundings | None = None
        self._calls: list[LayerCalls[Any]] = []
        self._programmes: list[TracedLayer | None] = []

    def begin(self, model: nn.Module, own_hook: object) -> KnownPass | None:
        """Return a KnownPass; None if each layer must be asked. own_hook: a hook that changes nothing."""
        if self._around is None:
            self._look(model, own_hook)
        if not self._calls:
            return None
        if [calls.programme for calls in self._calls] != self._programmes or not self._around.hold():  # type: ignore[union-attr]
            self._look(model, own_hook)
        known = [programme for programme in self._programmes if programme is not None]
        if not known or not self._around.is_quiet():  # type: ignore[union-attr]
            return None
        # A layer that has changed may hold code of others, which runs in this pass.
        if not all(programme.is_current() and programme.is_unobserved() for programme in known):
            return None
        return KnownPass(frozenset(known))

    def _look(self, model: nn.Module, own_hook: object) -> None:
        layers = [module for module in model.modules() if isinstance(module, TracedForward)]
        self._calls = [vars(layer)[FUSED] for layer in layers]
        self._programmes = [calls.programme for calls in self._calls]
        # A trace has read all modules inside its layer, and notices their changes.
        traced = zip(layers, self._programmes, strict=True)
        inside = {child for layer, programme in traced if programme is not None for child in [*layer.modules()][1:]}
        for programme in self._programmes:
            inside -= {child for called in getattr(programme, "called", ()) for child in called.modules()}
        self._around = Surroundings([m for m in model.modules() if m not in inside], own_hook)

    def __reduce__(self) -> Any:
        return PassWatch, ()


# -- one layer -----------------------------------------------------------------------------------------

Layer = TypeVar("Layer", bound=TracedLayer)


class LayerCalls(ABC, Generic[Layer]):
    """The traced layer of one module.

    It is made at the first call, and again when something that it depends on has changed.

    A copy or a pickle starts without it, because it may hold addresses.
    """

    computes: Callable[[object], bool]  # whether the kernels compute on this input

    def __init__(self) -> None:
        self.kinds: tuple[object, ...] = ()  # the dtypes of the input and the tables that were traced, and the device
        self.names: frozenset[str] = frozenset()  # of the arguments of that call
        self.tensors: frozenset[str] = frozenset()  # those of TENSORS that were not None
        self.plain: dict[str, Any] = {}  # and those that were plain values
        self.reads: list[Read] = []  # the reads of the trace, if there is no programme
        self.programme: Layer | None = None
        self.kind: tuple[object, ...] = ()  # two layers of one kind take the same calls

    @abstractmethod
    def make(self, trace: Trace, planned: PlannedAttention, *, x: Tensor, table_dtype: torch.dtype | None) -> Layer:
        """Make the object that computes the layer. Raises UntraceableError if it cannot be made."""

    @abstractmethod
    def compute(self, programme: Layer, x: Tensor, pages: LayerOverPages, place: LayerPlace) -> Tensor | None:
        """Write K and V, and return the layer's result; None, without a write, if the pages hold other heads."""

    def others(self, programme: Layer, place: LayerPlace) -> tuple[Tensor | None, ...]:
        """Return what the layer returns behind its hidden states."""
        return ()

    def run_without_pages(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | tuple[Any, ...] | None:
        """Return the result of a call that has no pages; None if the layer's own code must run."""
        return None

    def run(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | tuple[Any, ...] | None:
        """Return the layer's result; None if its own code must run."""
        if len(args) > 1:
            names = parameter_names(original_class(layer).forward)[1:]
            given = dict(zip(names, args[1:], strict=False))
            if len(args) - 1 > len(names) or not given.keys().isdisjoint(kwargs):
                return None
            args, kwargs = args[:1], given | kwargs
        cache = kwargs.get(CACHES[0])
        if not isinstance(cache, CacheOverPages):  # which most are: two calls less
            cache = tokens_part(_cache_of(kwargs))
            if not isinstance(cache, CacheOverPages):
                return self.run_without_pages(layer, args, kwargs)
        if len(args) != 1 or not self.computes(args[0]):
            return None
        x, known = args[0], cache.known_pass
        place = None if known is None else known.place_of(self, x, kwargs)
        if place is None:
            asked = self.ask(layer, x, kwargs)
            if isinstance(asked, str):
                return None
            place = asked
        programme = self.programme
        assert programme is not None
        pages: Any = cache.layers[programme.layer_idx]
        if pages.group is not place.group or pages.prepared_step() is not place.step:
            return None
        out = self.compute(programme, x, pages, place)
        if out is None:
            return None
        pages.pass_done(place.step)
        if known is not None:
            known.note(place, out)
        return out if programme.others is None else (out, *self.others(programme, place))

    def ask(self, layer: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> LayerPlace | str:
        """Return where the layer writes and reads in this pass; or why its own code must run, as a clause.

        x: what it is called with, for which `computes` holds. kwargs: its other arguments, with a CacheOverPages.
        """
        tables = kwargs.get("position_embeddings")
        if tables is not None and (type(tables) is not tuple or list(map(type, tables)) != [Tensor, Tensor]):
            return "its position embeddings are not two tensors"
        if output_capturing._active_collector.get():
            return "transformers collects what its modules return"
        programme = self._ready(layer, x, tables, kwargs)
        if programme is None:
            return "its code does something that is not known"
        if not programme.is_unobserved():
            return "a hook wants to see a module"
        known, window = (True, None) if programme.tried else window_of(kwargs.get("attention_mask"))
        whole_cache = _cache_of(kwargs)
        pages = tokens_part(whole_cache).layers[programme.layer_idx]
        if not known or not isinstance(pages, LayerOverPages):
            return "its mask or its cache is not ours"
        group = pages.group
        if window != group.window or window != programme.attention.window:
            return "its mask, its cache and its attention have other windows"
        if group.context is not None:
            return "one call cannot wait for other ranks in its middle"
        whole = pages.prepared_step()
        if whole is None or not whole.contiguous[pages.group_index]:
            return "its pass needs a mask"
        step = whole.groups[pages.group_index]
        # With padding, there are fewer tokens than columns.
        filled = len(x) * whole.num_columns if whole.token_columns is None else 0
        tokens = len(step.slots) if step.written is None else filled
        if not programme.takes(x, tables, tokens=tokens):
            return "its pass has padding, or tensors of another shape or place"
        has_source = isinstance(whole_cache, RaggedEncoderDecoderCache)
        if has_source is not (programme.source is not None):
            return "it attends to an encoder's output in another way than its cache"
        return LayerPlace(kwargs, self.kind, group, whole, step, whole_cache if has_source else None)

    def _ready(
        self, layer: nn.Module, x: Tensor, tables: tuple[Tensor, Tensor] | None, kwargs: dict[str, Any]
    ) -> Layer | None:
        table = None if tables is None else (tables[0].dtype, tables[0].shape[-1])
        kinds, programme = (x.dtype, table, x.device, type(_cache_of(kwargs))), self.programme
        tensors = frozenset(name for name in TENSORS if kwargs.get(name) is not None)
        same = kinds == self.kinds and kwargs.keys() == self.names and tensors == self.tensors
        if same and all(is_same_value(kwargs[name], value) for name, value in self.plain.items()):
            if programme is not None and programme.is_current():
                return programme
            if programme is None and all(read.owner.get(read.name) is read.value for read in self.reads):
                return None  # a layer that could not be traced has not changed since
        self.kinds, self.names, self.tensors = kinds, frozenset(kwargs), tensors
        self.plain = {name: value for name, value in kwargs.items() if name not in TENSORS}
        self.programme = self._make(layer, x, table, kwargs)
        if self.programme is not None:
            plain = tuple((name, type(value), value) for name, value in self.plain.items())
            self.kind = (*kinds, self.names, tensors, plain, *self.programme.limits)
        return self.programme

    def _make(
        self, layer: nn.Module, x: Tensor, table: tuple[torch.dtype, int] | None, kwargs: dict[str, Any]
    ) -> Layer | None:
        table_dtype, table_size = table or (None, None)
        trace = Trace(x.dtype, table_size=table_size, device=x.device)
        if isinstance(_cache_of(kwargs), RaggedEncoderDecoderCache):
            trace.cache_class = RaggedEncoderDecoderCache
        by_operators = [known for module in layer.modules() if (known := operators_within(module)) is not None]
        trace.tried = bool(by_operators)
        trace.is_called = is_mixture
        trace.equals |= {known.implementation: ATTENTION_NAME for known in by_operators if known.implementation}
        try:
            given = bound(original_class(layer), (x,), kwargs)
            if given is None or not given[2].tensors <= {*TENSORS}:
                raise UntraceableError("it is given more than plain values")
            trace.decoder_layer(layer, x.shape[-1], given[2])
            module = next((each for o in trace.operations if o.kind == "attend" for each in o.modules), layer)
            planned = planned_attention(module)
            note_plan(trace, module)
            if planned is None:
                raise UntraceableError("its attention has another backend")
            return self.make(trace, planned, x=x, table_dtype=table_dtype)
        except UntraceableError:
            self.reads = trace.reads
            return None


class NativeCalls(LayerCalls[LayerProgramme]):
    """The LayerCalls of a layer on the CPU: one native call for a pass of few tokens."""

    computes = staticmethod(native)

    def __reduce__(self) -> Any:
        return NativeCalls, ()

    def make(
        self, trace: Trace, planned: PlannedAttention, *, x: Tensor, table_dtype: torch.dtype | None
    ) -> LayerProgramme:
        spec = replace(planned.spec, dtype=x.dtype, bias=attend_of(trace)[0].values["biased"])
        if not isinstance(planned.backend, CpuBackend) or planned.backend.refuses(spec) is not None:
            raise UntraceableError("its attention has another backend")
        return LayerProgramme(trace, table_dtype, attention_of(trace, spec), source_attention(trace, planned_source))

    def others(self, programme: LayerProgramme, place: LayerPlace) -> tuple[Tensor | None, ...]:
        """Return the biases that the layer hands on, as it was given them or as this pass has made them."""
        assert programme.others is not None
        cache = _cache_of(place.kwargs)
        held = {BIAS: tokens_part(cache), SOURCE_BIAS: getattr(cache, "cross_attention_cache", None)}
        return tuple(
            held[name].given_bias[0] if name in held else cache if name else None for name in programme.others
        )

    def compute(self, programme: LayerProgramme, x: Tensor, pages: LayerOverPages, place: LayerPlace) -> Tensor | None:
        storage = pages.group.storage(programme.layer_idx, *programme.written)
        if not programme.fits(storage):
            return None
        if place.fields is None:
            place.fields = CallFields.of(x, place.tables, place.group_step, storage.block_size)
        bias = NO_BIAS
        if programme.biased_heads:
            known = _position_bias(programme, pages.cache, place)
            if known is None:
                return None
            bias = position_bias_fields(known, programme.biased_heads, place.group_step.ragged.max_kv)
        adapters = PassAdapters.running()
        if programme.tail is not None and (adapters is not None or place.whole is not None):
            return None
        if place.whole is None:
            return programme(x, place.fields, storage.pages, bias=bias, adapters=adapters)
        if programme.is_source_biased and not _source_is_plain(programme, place.whole.cross_attention_cache, place):
            return None
        source = _source_layer(programme, place)
        held = None if source is None else source.group.storages.get(source.layer_idx)
        if source is None or held is None or not programme.fits_source(storage, held):
            return None
        if place.source_fields is None:
            step = place.step.groups[source.group_index]
            place.source_fields = SourceFields.of(step, held.block_size)
        return programme(x, place.fields, storage.pages, (held.pages, place.source_fields), bias=bias)


def _position_bias(programme: LayerProgramme, cache: CacheOverPages, place: LayerPlace) -> PositionBias | None:
    """Return what a layer adds to the scores of its tokens, see attention/hf/bias.py; None for what is not known."""
    if programme.own_bias is None:
        given, known = cache.given_bias or (None, None)
        return known if place.kwargs.get(BIAS) is given else None
    ragged = place.group_step.ragged
    known = table_of(programme.attends, ragged.max_kv, cache.bias_tables)
    if BIAS in (programme.others or ()):
        cache.given_bias = _numbers(programme, place, len(place.group_step.slots)), known
    return known


def _source_is_plain(programme: LayerProgramme, cache: CacheOverPages, place: LayerPlace) -> bool:
    """Return whether a layer adds zeros to the scores of an encoder's output."""
    given: Tensor | None = place.kwargs.get(SOURCE_BIAS)
    if given is None:  # the trace has seen that its code makes zeros
        cache.given_bias = _numbers(programme, place, 1), None
        return True
    return cache.given_bias is not None and cache.given_bias[0] is given and cache.given_bias[1] is None


def _numbers(programme: LayerProgramme, place: LayerPlace, keys: int) -> Tensor:
    """Return what layers hand on in place of a bias [1, H, N, keys], whose numbers nobody reads in a ragged pass."""
    tokens = len(place.group_step.slots)
    return torch.zeros(1, dtype=programme.dtype).expand(1, programme.biased_heads or 1, tokens, keys)


def _source_layer(programme: LayerProgramme, place: LayerPlace) -> SourceLayer | None:
    """Return the layer of the cache that has keys of the encoder's output, after it got those that this pass adds."""
    whole, source, states = place.whole, programme.source, place.kwargs.get(SOURCE_STATES)
    assert whole is not None and source is not None
    layer: SourceLayer = whole.cross_attention_cache.layers[source.layer_idx]
    if not whole.is_updated[source.layer_idx]:
        if type(states) is not Tensor or states.ndim != 3 or states.dtype is not programme.dtype:
            return None
        keys, values = (
            linear(states).view(1, -1, source.heads, dim).transpose(1, 2)
            for linear, dim in ((source.key, source.dim), (source.value, source.value_dim))
        )
        layer.keep(keys, values)
        whole.is_updated[source.layer_idx] = True
    return layer


def _cache_of(kwargs: dict[str, Any]) -> Any:
    cache = kwargs.get(CACHES[0])
    return kwargs.get(CACHES[1]) if cache is None else cache
