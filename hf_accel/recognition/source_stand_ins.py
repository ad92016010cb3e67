"""Stand-ins for the output of an encoder that a decoder layer attends to, and for the cache that keeps its keys.

The layer's code computes keys and values of that output where the cache says that it has none, and takes those of the
cache otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from .call_form import CACHE
from .model_stand_ins import CacheStandIn
from .operation import Operation, Span, UntraceableError
from .stand_ins import Recorder, StandIn
from .symbols import SOURCE, SOURCE_WIDTH, TOKENS_BEFORE, Opaque

KEYS, VALUES = -1, -2  # the buffers of keys and values that the cache keeps of an encoder's output
FIRST_OF_SOURCE = -3  # and those of the numbers that are computed of it, which go down from here


@dataclass(frozen=True)
class SourceKeys:
    """The way in which a layer computes the keys and values of an encoder's output, which each have one linear layer.

    key, value: these layers. heads, dim, value_dim: of their results. layer_idx: the layer of the cache.
    """

    key: nn.Module
    value: nn.Module
    heads: int
    dim: int
    value_dim: int
    layer_idx: int

    @staticmethod
    def of(operations: list[Operation], key: Any, value: Any, layer_idx: Any) -> SourceKeys:
        """Find the linear layers of what the code gives to the cache, [B, heads, T, dim]."""
        for x in (key, value):
            known = isinstance(x, StandIn) and x.rows is SOURCE and x.heads is not None and x.transposed
            if not known or x.factor != 1 or x.flat or x.cached:
                raise UntraceableError("it keeps something else of an encoder's output than keys and values")
        made = {o.outputs[0]: o.modules[0] for o in operations if o.inputs[0].buffer == FIRST_OF_SOURCE}
        if key.span not in made or value.span not in made or key.heads != value.heads or type(layer_idx) is not int:
            raise UntraceableError("it computes keys of an encoder's output in a way of its own")
        dims = key.width // key.heads, value.width // value.heads
        return SourceKeys(made[key.span], made[value.span], key.heads, *dims, layer_idx)

    def kept(self, trace: Recorder) -> tuple[StandIn, StandIn]:
        """Return the stand-ins for keys and values [B, heads, T, dim] of the cache."""
        found = []
        for buffer, dim in ((KEYS, self.dim), (VALUES, self.value_dim)):
            width = self.heads * dim
            span = Span(buffer, 0, width)
            found.append(StandIn(trace, span, width, self.heads, transposed=True, cached=True, rows=SOURCE))
        return found[0], found[1]


class SourceRecorder(Recorder, Protocol):
    """The stand-ins ask these things of a trace of a layer that attends to an encoder's output, besides others.

    cache_class: the class of its cache. source: the keys of that output, None if the code has not said them yet.
    knows_source: whether the cache has these keys in the traced pass.
    """

    cache_class: type | None
    source: SourceKeys | None
    knows_source: bool

    def write_source(self, key: Any, value: Any, layer_idx: Any) -> tuple[StandIn, StandIn]: ...


class PairStandIn(Opaque):
    """A cache of two parts: one for the decoder's tokens, and one for the output of an encoder."""

    def __init__(self, trace: SourceRecorder) -> None:
        super().__init__(CACHE)
        self.trace = trace
        self.self_attention_cache = CacheStandIn(trace)
        self.cross_attention_cache = SourceCacheStandIn(trace)
        self.is_updated = Updates(trace)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # the code asks for it by isinstance
        return self.trace.cache_class

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return TOKENS_BEFORE

    def __bool__(self) -> bool:
        return True


class Updates(Opaque):
    """The dictionary that says for which layers the cache has keys of the encoder's output."""

    def __init__(self, trace: SourceRecorder) -> None:
        super().__init__("is_updated")
        self.trace, self._known = trace, trace.knows_source

    def get(self, layer_idx: Any) -> bool:
        if type(layer_idx) is not int:
            raise UntraceableError("it asks the cache for another layer")
        return self._known

    __getitem__ = get

    def __setitem__(self, layer_idx: Any, value: Any) -> None:
        # Whisper's code says this before it has updated the cache, in the attention of which the result was asked.
        if type(layer_idx) is not int or value is not True:
            raise UntraceableError("it tells the cache something else than that it has the keys of a layer")


class SourceCacheStandIn(Opaque):
    """The part of a cache that keeps keys and values of an encoder's output."""

    def __init__(self, trace: SourceRecorder) -> None:
        super().__init__("cross_attention_cache")
        self.trace = trace
        self.layers = KeptLayers(trace)

    def update(self, key: Any, value: Any, layer_idx: Any, *args: Any, **kwargs: Any) -> tuple[StandIn, StandIn]:
        return self.trace.write_source(key, value, layer_idx)

    def __bool__(self) -> bool:
        return True


class KeptLayers:
    """The layers of that part."""

    def __init__(self, trace: SourceRecorder) -> None:
        self._trace = trace

    def __getitem__(self, layer_idx: Any) -> KeptLayer:
        source = self._trace.source
        if not self._trace.knows_source or source is None or layer_idx != source.layer_idx:
            raise UntraceableError("it reads keys of an encoder's output that the cache does not have")
        return KeptLayer(*source.kept(self._trace))


@dataclass(frozen=True)
class KeptLayer:
    """One layer of them."""

    keys: StandIn
    values: StandIn


def source_states(trace: Recorder) -> StandIn:
    """Return the stand-in for an encoder's output [B, M, width], which linear layers of that width may take."""
    return StandIn(trace, Span(FIRST_OF_SOURCE, 0, SOURCE_WIDTH), SOURCE_WIDTH, rows=SOURCE)


def as_source(x: StandIn, width: int, number: int) -> StandIn:
    """Return the result of operation `number` on rows of an encoder's output."""
    return replace(x, span=Span(FIRST_OF_SOURCE - 1 - number, 0, width), width=width)
