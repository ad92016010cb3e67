"""The place of a pass where decoder layers write what they keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...cache.group import PageGroup
from ...cache.hf.encoder_decoder import RaggedEncoderDecoderCache
from ...cache.step import GroupStep, Step
from ...linear.adapters import PassAdapters
from ..layer_programme import CallFields, SourceFields, StateFields


@dataclass(eq=False)
class LayerPlace:
    """The place where a pass writes K and V, or states, of the layers of one group, and what it gives to each of them.

    kwargs: the arguments of a layer's call, by name. kind: the `kind` of that layer. tables: cos and sin, [B or 1, T,
    head_dim]; None if the layer is given none. step: the Step of all groups.
    fields: the part of a native call that all layers of the group share; it is made with the first call. whole: the
    cache that also keeps keys of an encoder's output; None for one without. source_fields: as fields, of its pages.
    state_group: of the states that the layers keep, with K and V or alone; None if they keep none. state_fields: as
    fields, of its pages. adapters: those of the pass; None for none.
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
    adapters: PassAdapters | None = None
