"""RaggedCache: the pages during one pass over the tokens of many sequences, end to end in one row."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...errors import UnsupportedError
from ..group import PageGroup
from ..step import Step
from .handle import PagedKV, as_attended, bypassed


class RaggedLayer(CacheLayerMixin):
    """One layer's view. To the model it looks empty, so that it makes no mask: the step says who sees what."""

    is_sliding = False
    columns = None  # the tokens are those of many sequences

    def __init__(self, cache: RaggedCache, layer_idx: int, group: PageGroup, group_index: int) -> None:
        # not super().__init__(): it would set `keys` and `values`
        self.cache, self.layer_idx = cache, layer_idx
        self.group, self.group_index = group, group_index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store K, V [1, Hkv, N, D] of the pass's tokens; K comes back with a PagedKV."""
        self.cache.check_read()
        key_states, value_states = as_attended(key_states, value_states)
        step = self.cache.step
        group_step = step.groups[self.group_index]
        keys, values = step.tokens(key_states), step.tokens(value_states)
        storage = self.group.storage(self.layer_idx, keys, values)
        storage.write(keys, values, group_step.slots)
        handle = PagedKV(self, storage, step, group_step, True, value_states)
        return handle.attach(key_states), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """Given to the model as past_key_values with the `step` that says which slots are written and read."""

    step: Step

    def __init__(self, groups: list[PageGroup], group_of_layer: list[int]) -> None:
        self.unread: RaggedLayer | None = None
        super().__init__(layers=[RaggedLayer(self, i, groups[g], g) for i, g in enumerate(group_of_layer)])

    def check_read(self) -> None:
        """Raise UnsupportedError if a layer's attention went past the pages."""
        if self.unread is not None:
            layer, self.unread = self.unread, None
            raise UnsupportedError(bypassed(layer.layer_idx))
