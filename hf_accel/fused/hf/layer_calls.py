"""Decoder layers of transformers that run by their trace over pages.

On the CPU such a layer is one native call; on a GPU some of its operations share a launch. In each pass, each layer
checks that its trace is still right. If nothing can change within a pass, the first layer checks for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from ...attention.expansion import KnownExpansion
from ...attention.hf.mask import window_of
from ...attention.hf.stock import ATTENTION_NAME
from ...cache.hf.cache_argument import CACHE_NAME
from ...cache.hf.encoder_decoder import RaggedEncoderDecoderCache, tokens_part
from ...cache.hf.layers import CacheOverPages, LayerOverPages
from ...kernels.cpu.library import FLOATS
from ...linear.experts import is_mixture
from ...recognition.call_form import CACHES, TENSORS, bound, parameter_names
from ...recognition.complex_rotation import cos_and_sin
from ...recognition.operation import UntraceableError
from ...recognition.trace import Trace
from ...recognition.unchanged import Reads, is_same_value
from ...undo.journal import Mixin, original_class
from ...undo.state import FUSED
from ..kept_states import Recorded
from ..traced_layer import TracedLayer
from .key_sharing import leave, may_share
from .layer_attention import heads_of_keys, operators_within, planned_attention
from .running_pass import LayerPlace, RunningPass


class TracedForward(Mixin):
    """A mixin for a decoder layer. A pass over pages runs the layer's trace; other calls run its own code."""

    asks_itself = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__dict__[FUSED].run(self, args, kwargs)
        if result is None:
            tables = kwargs.get("position_embeddings")
            if type(tables) is Tensor and tables.is_complex():  # torch rounds products by a transposed one otherwise
                kwargs["position_embeddings"] = tables.contiguous()  # than a native call does (older transformers)
            with RunningPass.own_code(self):  # type: ignore[arg-type]
                result = super().forward(*args, **kwargs)  # type: ignore[misc]
        return result


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
        self.reads = Reads([])  # the reads of the trace, if there is no programme
        self.programme: Layer | None = None
        self.kind: tuple[object, ...] = ()  # two layers of one kind take the same calls

    @abstractmethod
    def make(self, trace: Trace, layer: nn.Module, *, x: Tensor, table_dtype: torch.dtype | None) -> Layer:
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
        cache = kwargs.get(CACHE_NAME)
        if not isinstance(cache, CacheOverPages):  # which most are: two calls less
            cache = tokens_part(cache_of(kwargs))
            if not isinstance(cache, CacheOverPages):
                return self.run_without_pages(layer, args, kwargs)
        if len(args) != 1 or not self.computes(args[0]):
            return None
        x, running = args[0], RunningPass.over(cache)
        place = None if running is None else running.place_of(self.programme, self.kind, x, kwargs)
        if place is None:
            asked = self.ask(layer, x, kwargs)
            if isinstance(asked, str):
                return None
            place = asked
            place.carried = None if running is None else running.carried
        programme = self.programme
        assert programme is not None
        if running is not None and not running.is_taken(programme):
            return None
        place.kwargs = kwargs
        pages: Any = cache.layers[programme.layer_idx]
        if pages.group is not place.group or pages.prepared_step() is not place.step:
            return None
        if not may_share(programme, pages, place):
            return None
        of_states = None if place.state_group is None else cache.state_layer(programme.layer_idx)
        if of_states is not None and of_states.group is not place.state_group:
            return None
        out = self.compute(programme, x, pages, place)
        if out is None:
            return None
        if programme.taken is None:
            pages.pass_done(place.step)
        leave(programme, pages, place, len(x))
        if of_states is not None and of_states is not pages:
            of_states.pass_done(place.step)
        if running is not None:
            running.note(programme, place, out)
        return out if programme.others is None else (out, *self.others(programme, place))

    def ask(self, layer: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> LayerPlace | str:
        """Return where the layer writes and reads in this pass; or why its own code must run, as a clause.

        x: what it is called with, for which `computes` holds. kwargs: its other arguments, with a CacheOverPages.
        """
        tables = kwargs.get("position_embeddings")
        if type(tables) is Tensor and tables.is_complex():
            tables = cos_and_sin(tables)
        if tables is not None and (type(tables) is not tuple or list(map(type, tables)) != [Tensor, Tensor]):
            return "its position embeddings are not two tensors"
        if output_capturing._active_collector.get():
            return "transformers collects what its modules return"
        programme = self._ready(layer, x, tables, kwargs)
        if programme is None:
            return "its code does something that is not known"
        if not programme.is_unobserved():
            return "a hook wants to see a module"
        attends, keeps = programme.attends_to_pages, bool(programme.written) or programme.taken is not None
        sees = programme.tried or not attends
        known, window = (True, None) if sees else window_of(kwargs.get("attention_mask"))
        whole_cache = cache_of(kwargs)
        pages = tokens_part(whole_cache).layers[programme.layer_idx]
        if not known or not isinstance(pages, LayerOverPages):
            return "its mask or its cache is not ours"
        group = pages.group
        if attends and (window != group.window or window != programme.attention.window):
            return "its mask, its cache and its attention have other windows"
        if group.context is not None:
            return "one call cannot wait for other ranks in its middle"
        whole = pages.prepared_step()
        if whole is None or (keeps and not whole.contiguous[pages.group_index]):
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
        states = None
        if programme.state_sizes is not None:
            layer_of_states = tokens_part(whole_cache).state_layer(programme.layer_idx)
            states, of_states = layer_of_states.group, whole.groups[layer_of_states.group_index]
            if of_states.written is not None or len(of_states.slots) != tokens:
                return "its pass has padding"
        return LayerPlace(kwargs, self.kind, tables, group, whole, step, whole_cache if has_source else None, states)

    def _ready(
        self, layer: nn.Module, x: Tensor, tables: tuple[Tensor, Tensor] | None, kwargs: dict[str, Any]
    ) -> Layer | None:
        table = None if tables is None else (tables[0].dtype, tables[0].shape[-1])
        kinds, programme = (x.dtype, table, x.device, type(cache_of(kwargs))), self.programme
        tensors = frozenset(name for name in TENSORS if kwargs.get(name) is not None)
        same = kinds == self.kinds and kwargs.keys() == self.names and tensors == self.tensors
        if same and all(is_same_value(kwargs[name], value) for name, value in self.plain.items()):
            if programme is not None and programme.is_current():
                return programme
            if programme is None and self.reads.hold():
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
        dtype = x.dtype
        if dtype is torch.float32 and any(states_kept(child) is not None for child in layer.children()):
            dtype = next((each.dtype for each in layer.parameters() if each.dtype in FLOATS), dtype)
        trace = Trace(dtype, table_size=table_size, device=x.device)
        trace.takes_wide = dtype is not x.dtype
        if isinstance(cache_of(kwargs), RaggedEncoderDecoderCache):
            trace.cache_class = RaggedEncoderDecoderCache
        by_operators = [known for module in layer.modules() if (known := operators_within(module)) is not None]
        trace.tried, trace.masks_biased = bool(by_operators), any(known.masks_biased for known in by_operators)
        trace.is_called, trace.states_of, trace.expands = is_mixture, states_kept, expands
        trace.heads_of = heads_planned
        trace.equals |= {known.implementation: ATTENTION_NAME for known in by_operators if known.implementation}
        try:
            given = bound(original_class(layer), (x,), kwargs)
            if given is None or not given[2].tensors <= {*TENSORS}:
                raise UntraceableError("it is given more than plain values")
            trace.decoder_layer(layer, x.shape[-1], given[2])
            if trace.taken is not None:  # pages of another layer, of which a plan says nothing to this one
                pages = tokens_part(cache_of(kwargs)).layers[trace.layer_idx]
                trace.taken_window = pages.group.window if isinstance(pages, LayerOverPages) else None
            return self.make(trace, layer, x=x, table_dtype=table_dtype)
        except UntraceableError:
            self.reads = Reads(trace.reads)
            return None


def states_kept(module: nn.Module) -> Recorded | None:
    """Return what is known of a module that keeps something else than keys and values; None for any other."""
    known = vars(module).get(FUSED)
    return known if isinstance(known, Recorded) else None


def heads_planned(module: nn.Module) -> tuple[int, int, int] | None:
    """Return the heads of keys that were planned for an attention module, and the numbers of a key and a value."""
    planned = planned_attention(module)
    return None if planned is None else heads_of_keys(planned.spec)


def expands(module: nn.Module) -> bool:
    """Return whether it is known how a module makes keys and values of compressed ones."""
    return isinstance(vars(module).get(FUSED), KnownExpansion)


def cache_of(kwargs: dict[str, Any]) -> Any:
    """Return the cache among the arguments of a layer; None if it has none."""
    # Without := within the generator, which torch.compile of torch 2.11 cannot follow.
    return next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
