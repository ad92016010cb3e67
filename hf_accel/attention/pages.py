"""Finding and gathering the blocks that hold the keys of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .masking import visible_keys


class PagedSequence(NamedTuple):
    """A row of the block table that has work; blocks wholly behind the window are left out."""

    row: int
    first_query: int
    num_queries: int
    first_block: int
    num_blocks: int
    num_keys: int  # from the start of the first block on

    @property
    def queries(self) -> slice:
        return slice(self.first_query, self.first_query + self.num_queries)

    @property
    def blocks(self) -> slice:
        return slice(self.first_block, self.first_block + self.num_blocks)


def paged_sequences(cu_q: Tensor, kv_len: Tensor, *, block_size: int, window: int | None) -> Iterator[PagedSequence]:
    """The sequences that have both queries and keys."""
    for row, ((start, stop), num_keys) in enumerate(zip(pairwise(cu_q.tolist()), kv_len.tolist(), strict=True)):
        queries = range(stop - start)
        keys = visible_keys(queries, num_queries=len(queries), num_keys=num_keys, causal=True, window=window)
        if queries and keys:
            first = keys.start // block_size
            count = -(-keys.stop // block_size) - first
            yield PagedSequence(row, start, len(queries), first, count, num_keys - first * block_size)


class Pages(NamedTuple):
    """The pages of one layer, [num_blocks, Hkv, block_size, D], and their scales [num_blocks, Hkv, block_size]."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def block_bytes(self) -> int:
        return (math.prod(self.keys.shape[1:]) + math.prod(self.values.shape[1:])) * self.keys.itemsize

    def gather(self, blocks: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Blocks [B, n] as K [B, Hkv, n * block_size, D] and V, in `dtype` if they are quantized."""
        heads = torch.arange(self.keys.shape[1], device=blocks.device, dtype=blocks.dtype).unsqueeze(1)
        # One head of a block is contiguous: picking those puts the heads outside the tokens in a single copy.
        rows = blocks.unsqueeze(1) * len(heads) + heads  # [B, Hkv, n]
        return pick(self.keys, self.key_scales, rows, dtype), pick(self.values, self.value_scales, rows, dtype)


def pick(pages: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [B, Hkv, n] of pages seen as [num_blocks * Hkv, block_size, D] -> [B, Hkv, n * block_size, D]."""
    picked = pages.view(-1, pages.shape[2] * pages.shape[3]).index_select(0, rows.flatten())
    picked = picked.view(*rows.shape[:2], -1, pages.shape[3])
    if scales is None:
        return picked
    factors = scales.view(-1, scales.shape[2]).index_select(0, rows.flatten()).view(*picked.shape[:3], 1)
    return picked.to(dtype) * factors.to(dtype)
