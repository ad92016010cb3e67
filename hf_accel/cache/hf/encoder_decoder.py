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
from .layers import CacheOverPages
from .ragged import RaggedCache, SourceLayer
from .tokens_before import TokensBefore


class SourceCache(CacheOverPages):
    """The part of an EncoderDecoderCache for the attention to the encoder's output."""

    step: Step

    def __init__(self, groups: list[PageGroup], group_index: int, num_layers: int) -> None:
        super().__init__(layers=self._lay_out(SourceLayer, groups, [(group_index,)] * num_layers, SourceLayer))


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


def tokens_part(cache: Any) -> Any:
    """Return the part of a cache that keeps the decoder's tokens."""
    return cache.self_attention_cache if isinstance(cache, RaggedEncoderDecoderCache) else cache
