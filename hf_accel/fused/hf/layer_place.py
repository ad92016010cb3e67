"""The place of a pass where decoder layers write what they keep, and what is known of a pass as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor

from ...cache.group import PageGroup
from ...cache.hf.encoder_decoder import RaggedEncoderDecoderCache
from ...cache.step import GroupStep, Step
from ..layer_programme import CallFields, SourceFields, StateFields
from ..traced_layer import TracedLayer


@dataclass(eq=False)
class LayerPlace:
    """The place where a pass writes K and V, or states, of the layers of one group, and what it gives to each of them.

    kwargs: the arguments of a layer's call, by name. kind: the `kind` of that layer. tables: cos and sin, [B or 1, T,
    head_dim]; None if the layer is given none. step: the Step of all groups.
    fields: the part of a native call that all layers of the group share; it is made with the first call. whole: the
    cache that also keeps keys of an encoder's output; None for one without. source_fields: as fields, of its pages.
    state_group: of the states that the layers keep, with K and V or alone; None if they keep none. state_fields: as
    fields, of its pages.
    """

    kwargs: dict[str, Any]
    kind: tuple[object, ...]
    tables: tuple[Tensor, Tensor] | None
    group: PageGroup
    step: Step
    group_step: GroupStep
    whole: RaggedEncoderDecoderCache | None = None
    state_group: PageGroup | None = None
    fields: CallFields | None = None
    source_fields: SourceFields | None = None
    state_fields: StateFields | None = None


PlaceKey = tuple[int, tuple[bool, bool] | None]  # the mask, which the place keeps; and TracedLayer.keeps


class KnownPass:
    """A pass within which nothing can change. programmes: of the layers that need not be asked again.

    A layer that gets the output of the layer before it, and the same other arguments, has the same place.
    """

    def __init__(self, programmes: frozenset[TracedLayer]) -> None:
        self.programmes = programmes
        self.out: Tensor | None = None  # of the layer before
        self.places: dict[PlaceKey, LayerPlace] = {}

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
        same = len(kwargs) == len(known) and all(map(is_, map(known.get, kwargs), kwargs.values()))
        return place if same else None

    def note(self, programme: TracedLayer, place: LayerPlace, out: Tensor) -> None:
        self.out = out
        self.places[_key(programme, place.kwargs)] = place


def _key(programme: TracedLayer | None, kwargs: dict[str, Any]) -> PlaceKey:
    """Return the key of a layer's place: layers that attend alternate in many models with layers that do not."""
    return id(kwargs.get("attention_mask")), None if programme is None else programme.keeps
