"""RaggedCache: the cache of a ragged pass, whose tokens are of many sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.layouts import PositionBias
from ..group import PageGroup
from ..kinds.once import OnceStep
from ..step import Step
from .layers import CacheOverPages, LayerOverPages, PagedKV, as_attended
from .tokens_before import TokensBefore


class RaggedLayer(LayerOverPages):
    """One layer of a RaggedCache.

    It tells the model that it is empty, so that the model makes no mask. The Step says what each token attends to.
    """

    is_sliding = False
    is_initialized = says_what_is_seen = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store K and V [1, Hkv, N, D] of the pass's tokens, and return them; K carries a PagedKV."""
        self.cache.check_read()
        keys, values = as_attended(key_states, value_states)
        return self.store(self.cache.step, keys, values).attach(keys), values

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """Return none, to code that asks each layer whether it has keys of a source."""
        if self.cache.once is None:
            raise AttributeError("the keys of a ragged pass are of many sequences")
        return torch.empty(0)

    def slots_seen(self, step: Step) -> Tensor:
        slots: Tensor = self.cache.slots_before(self.group_index)
        return slots[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 1 if self.cache.one_column else query_length, 0

    def get_seq_length(self) -> int:
        return 0


class SourceLayer(LayerOverPages):
    """One layer's keys and values of the encoder's output."""

    attends_to_all = True
    is_sliding = False
    is_initialized = True

    def __init__(self, cache: CacheOverPages, layer_idx: int, group: PageGroup, group_index: int) -> None:
        super().__init__(cache, layer_idx, group, group_index)
        self._few: tuple[Tensor, Tensor] | None = None  # K and V of one row, whose heads and dtype later passes show

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store K and V [1, H, M, D] of the sequences that begin, and return them; K carries a PagedKV."""
        self.cache.check_read()
        keys, values = as_attended(key_states, value_states)
        return self.keep(keys, values).attach(keys), values

    def keep(self, keys: Tensor, values: Tensor) -> PagedKV:
        """Store K and V as `update` does, for attention that reads the pages by itself."""
        self._few = keys[:, :, :1].clone(), values[:, :, :1].clone()
        return self.store(self.cache.step, keys, values)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """K [1, H, 1, D] that carries a PagedKV of all that is stored; None before the first update."""
        if self._few is None:
            return None
        self.cache.check_read()
        step: Step = self.cache.step
        group_step = step.groups[self.group_index]
        handle = PagedKV(self, self.group.storages[self.layer_idx], step, group_step, True, self._few[1])
        return handle.attach(self._few[0])

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self._few is None else self._few[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


class RaggedSourceLayer(SourceLayer):
    """A SourceLayer among layers that attend to tokens. Code leaves it out where it says that it holds nothing."""

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Return whether tokens of the pass have sources whose keys an earlier pass, or this one, has stored."""
        own: OnceStep = self.cache.step.groups[self.group_index].own
        return self._few is not None and own.is_attended

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._be_looked_at()
        return super().update(key_states, value_states)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        self._be_looked_at()
        return super().keys

    def _be_looked_at(self) -> None:
        """Let code look at the keys before it attends to them, or stores others."""
        if self.cache.unread is self:
            self.cache.unread = None


class RaggedCache(CacheOverPages):
    """The past_key_values of a ragged pass.

    step: says which slots the pass writes and reads. one_column: whether it tells the model of one key alone, for a
    model that makes masks which nobody reads. bias: what its attention adds to scores by positions. positions: of the
    N tokens of the pass, int64.
    unmasked: whether a trial has shown that the Step says what tokens see where the model makes no mask.
    before: for a model that counts positions by itself, the tokens before each token; None for one that is given them.
    """

    step: Step
    positions: Tensor
    bias: PositionBias | None = None
    unmasked: bool = False
    before: TokensBefore | None = None

    def __init__(
        self, groups: list[PageGroup], groups_of_layer: list[tuple[int, ...]], *, one_column: bool = False
    ) -> None:
        self.one_column = one_column
        self._groups = groups
        self._slots_before: tuple[Step | None, dict[int, Tensor]] = (None, {})
        super().__init__(layers=self._lay_out(RaggedLayer, groups, groups_of_layer, RaggedSourceLayer))

    @property
    def is_kept(self) -> bool:
        """Return whether a layer has kept something in its pages, as those of a model that is given the cache do."""
        return any(group.storages for group in self._groups)

    @property
    def once(self) -> OnceStep | None:
        """Return what the pass reads and writes of sources; None for a model without any."""
        found = (step.own for step in self.step.groups if isinstance(step.own, OnceStep))
        return next(found, None)

    def step_for(self, layer: RaggedLayer, keys: Tensor) -> Step:
        return self.step

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return 0 if self.before is None else self.before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0  # for masks, of which a ragged pass needs none

    def slots_before(self, group_index: int) -> Tensor:
        """Return the slots in the window of each token, [N, window], which the layers of a group share."""
        if self._slots_before[0] is not self.step:
            self._slots_before = (self.step, {})
        known, group = self._slots_before[1], self._groups[group_index]
        if group_index not in known:
            ragged = self.step.groups[group_index].ragged
            known[group_index] = ragged.slots_before(group.window or 1, group.pool.block_size)
        return known[group_index]
