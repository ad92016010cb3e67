"""The pass over pages that a thread runs: what its layers share, and what is done where a layer's own code runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.compiler import is_compiling

from ...cache.group import PageGroup
from ...cache.hf.encoder_decoder import RaggedEncoderDecoderCache
from ...cache.step import GroupStep, Step
from ...linear.adapters import PassAdapters
from ...recognition.call_form import OF_LAYER
from ..traced_layer import TracedLayer

PlaceKey = tuple[int, tuple[bool, bool] | None]  # the mask, which the place keeps; and TracedLayer.keeps

_running: ContextVar[RunningPass | None] = ContextVar("hf_accel_pass", default=None)


class CarriedToLayers(Protocol):
    """The part of a generation.carried.Carried that layers ask for."""

    @property
    def adapters(self) -> PassAdapters | None: ...


@dataclass(eq=False)
class LayerPlace:
    """The place where a pass writes K and V, or states, of the layers of one group, and what it gives to each of them.

    kwargs: the arguments of the call of the layer that runs now, by name. kind: the `kind` of that layer. tables: cos
    and sin, [B or 1, T, head_dim]; None if the layer is given none. step: the Step of all groups. whole: the cache
    that also keeps keys of an encoder's output; None for one without. state_group: of the states that the layers keep,
    with K and V or alone; None if they keep none. carried: what some tokens of the pass carry; None for nothing. held:
    the inputs of native calls that the layers share, and tensors whose addresses are among them, by the input's name.
    """

    kwargs: dict[str, Any]
    kind: tuple[object, ...]
    tables: tuple[Tensor, Tensor] | None
    group: PageGroup
    step: Step
    group_step: GroupStep
    whole: RaggedEncoderDecoderCache | None = None
    state_group: PageGroup | None = None
    carried: CarriedToLayers | None = None
    held: dict[str, Any] = field(default_factory=dict)

    @property
    def adapters(self) -> PassAdapters | None:
        """Return what is added to products in some of the rows; None for nothing."""
        return None if self.carried is None else self.carried.adapters


class RunningPass:
    """A pass over the tokens of many sequences, which this thread runs within `running()`.

    cache: the RaggedCache of its tokens. programmes: of the layers that cannot change within the pass, so that they
    need not be asked again. carried: what some of its tokens carry; None for nothing.

    A layer that gets the output of the layer before it, and the same other arguments, has the same place.
    """

    def __init__(
        self, cache: Any, programmes: frozenset[TracedLayer] = frozenset(), carried: CarriedToLayers | None = None
    ) -> None:
        self.cache, self.programmes, self.carried = cache, programmes, carried
        self.adapters = None if carried is None else carried.adapters
        self.out: Tensor | None = None  # of the layer before
        self.places: dict[PlaceKey, LayerPlace] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the pass within the block. Raises UnsupportedError if a part of an adapter was left out in it."""
        token = _running.set(self)
        try:
            with nullcontext() if self.adapters is None else self.adapters.hooked(self.adapters.outside):
                yield
        finally:
            _running.reset(token)
        if self.adapters is not None:
            self.adapters.check_added()

    @staticmethod
    def now() -> RunningPass | None:
        """Return the pass that this thread runs; None if it runs none."""
        return None if is_compiling() else _running.get()  # a compiler could not follow

    @staticmethod
    def over(cache: object) -> RunningPass | None:
        """Return the pass that this thread runs, if that is the cache of its tokens."""
        now = RunningPass.now()
        return now if now is not None and now.cache is cache else None

    @staticmethod
    def own_code(layer: nn.Module) -> AbstractContextManager[None]:
        """Return the block within which a decoder layer runs its own code: hooks do what its native call would do."""
        now = RunningPass.now()
        return nullcontext() if now is None or now.adapters is None else now.adapters.hooked(layer.modules())

    def is_taken(self, programme: TracedLayer) -> bool:
        """Return whether the one call of a layer can do all that its tokens carry."""
        return self.adapters is None or programme.is_one_call

    def place_of(
        self, programme: TracedLayer | None, kind: tuple[object, ...], x: Tensor, kwargs: dict[str, Any]
    ) -> LayerPlace | None:
        """Return the place of a layer before, if this layer has the same; None if this layer must be asked.

        kind: the `kind` of this layer. x, kwargs: what it is called with.
        """
        if programme not in self.programmes or x is not self.out:
            return None
        place = self.places.get(_key(programme, kwargs))
        if place is None or kind != place.kind:
            return None
        known = place.kwargs
        if len(kwargs) != len(known):
            return None
        for name, value in kwargs.items():
            if known.get(name) is not value and name != OF_LAYER:  # of which each layer has its own
                return None
        return place

    def note(self, programme: TracedLayer, place: LayerPlace, out: Tensor) -> None:
        if self.programmes:
            self.out = out
            self.places[_key(programme, place.kwargs)] = place


def _key(programme: TracedLayer | None, kwargs: dict[str, Any]) -> PlaceKey:
    """Return the key of a layer's place: layers that attend alternate in many models with layers that do not."""
    return id(kwargs.get("attention_mask")), None if programme is None else programme.keeps
