"""The caches of encoder-decoders: pages of the decoder's tokens, and pages of the encoder's output that these see.

transformers' decoders take an EncoderDecoderCache, ask it for the number of tokens before a pass, and compute keys and
values of the encoder's output where `is_updated` says that the layer has none yet.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from ..group import PageGroup
from ..kinds.once import OnceGroup, OnceStep
from ..step import Step
from .layers import CacheOverPages, LayerOverPages, PagedKV, as_attended
from .ragged import RaggedCache
from .tokens_before import TokensBefore


class SourceLayer(LayerOverPages):
    """One layer's keys and values of the encoder's output."""

    attends_to_all = True
    is_sliding = False
    is_initialized = True

    def __init__(self, cache: SourceCache, layer_idx: int, group: PageGroup, group_index: int) -> None:
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


class SourceCache(CacheOverPages):
    """The part of an EncoderDecoderCache for the attention to the encoder's output."""

    step: Step

    def __init__(self, groups: list[PageGroup], group_index: int, num_layers: int) -> None:
        super().__init__(layers=self._lay_out(SourceLayer, groups, [(group_index,)] * num_layers))


class RaggedEncoderDecoderCache(EncoderDecoderCache):
    """The past_key_values of a ragged pass of an encoder-decoder.

    groups, groups_of_layer: see cache.hf.page_groups; the last group is that of the encoder's output. one_column: see
    RaggedCache.
    """

    def __init__(
        self, groups: list[PageGroup], groups_of_layer: list[tuple[int, ...]], *, one_column: bool = False
    ) -> None:
        # super().__init__() is not called: it asks a cache of transformers how long each layer is.
        index = source_index(groups)
        self.self_attention_cache: Any = RaggedCache(groups, groups_of_layer, one_column=one_column)
        self.cross_attention_cache: Any = SourceCache(groups, index, len(groups_of_layer))
        self.is_updated: dict[int, bool] = {}
        self._index = index

    def begin(self, step: Step, positions: Tensor, *, first_counts: bool) -> Tensor | None:
        """Begin a pass over tokens at these positions [N] of their sequences. first_counts: see TokensBefore.

        Returns the encoder's output [1, M, C] of the sequences that begin; None if none does.
        """
        for part in (self.self_attention_cache, self.cross_attention_cache):
            part.step, part.unread = step, None  # a pass that failed may have left a layer unread
            part.given_bias = None
        own: OnceStep = step.groups[self._index].own
        self.self_attention_cache.before = TokensBefore(positions, first_counts)
        self.is_updated = dict.fromkeys(range(len(self.cross_attention_cache.layers)), own.sources is None)
        return own.sources

    def check_read(self) -> None:
        """Raise UnsupportedError if the last attention of either kind did not read its pages."""
        self.self_attention_cache.check_read()
        self.cross_attention_cache.check_read()

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.self_attention_cache.before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        offset: int = self.self_attention_cache.get_query_offset(layer_idx)
        return offset


def source_index(groups: list[PageGroup]) -> int:
    """Return the index of the group that holds keys of an encoder's output. Raises ValueError if there is none."""
    return [isinstance(group, OnceGroup) for group in groups].index(True)
