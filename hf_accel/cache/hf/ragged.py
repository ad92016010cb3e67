"""RaggedCache: the pages during one pass over the tokens of many sequences, end to end in one row."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..group import PageGroup
from ..step import Step
from .handle import CacheOverPages, LayerOverPages, as_attended


class RaggedLayer(LayerOverPages):
    """One layer's view. To the model it looks empty, so that it makes no mask: the step says who sees what."""

    is_sliding = False
    is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store K, V [1, Hkv, N, D] of the pass's tokens; K comes back with a PagedKV."""
        self.cache.check_read()
        keys, values = as_attended(key_states, value_states)
        return self.store(self.cache.step, keys, values).attach(keys), values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


class RaggedCache(CacheOverPages):
    """Given to the model as past_key_values with the `step` that says which slots are written and read."""

    step: Step

    def __init__(self, groups: list[PageGroup], group_of_layer: list[int]) -> None:
        super().__init__(layers=[RaggedLayer(self, i, groups[g], g) for i, g in enumerate(group_of_layer)])
