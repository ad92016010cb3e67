"""Finding and gathering the blocks that hold the keys of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.quantized import INT4, dequantize, rotate
from ..kernels.layouts import KV, PositionBias, Ragged
from .masking import visible_keys


class PagedSequence(NamedTuple):
    """A sequence of a Ragged that has work; blocks wholly behind the window are left out."""

    number: int  # of the row in the block table
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


def paged_sequences(ragged: Ragged, *, block_size: int, window: int | None) -> Iterator[PagedSequence]:
    """Iterate over the sequences that have both queries and keys."""
    starts, lengths = ragged.cu_q.tolist(), ragged.kv_len.tolist()
    for number, ((start, stop), num_keys) in enumerate(zip(pairwise(starts), lengths, strict=True)):
        queries = range(stop - start)
        keys = visible_keys(queries, num_queries=len(queries), num_keys=num_keys, causal=True, window=window)
        if queries and keys:
            first = keys.start // block_size
            count = -(-keys.stop // block_size) - first
            yield PagedSequence(number, start, len(queries), first, count, num_keys - first * block_size)


def gather_sequence(pages: KV, ragged: Ragged, sequence: PagedSequence, dtype: torch.dtype) -> KV:
    """Return k [1, Hkv, num_keys, D] and v of one sequence, those that bottom-right order makes visible."""
    assert ragged.block_table is not None
    k, v, *_ = gather(pages, ragged.block_table[sequence.number, sequence.blocks].unsqueeze(0), dtype)
    return KV(k[:, :, : sequence.num_keys], v[:, :, : sequence.num_keys])


def sequence_bias(bias: PositionBias | None, sequence: PagedSequence, block_size: int) -> Tensor | None:
    """Return what is added to the scores of a sequence's queries and gathered keys, [Hq, Q, T]."""
    if bias is None:
        return None
    before, stop = sequence.first_block * block_size, sequence.num_keys
    positions = torch.arange(min(0, stop - sequence.num_queries), stop, device=bias.table.device) + before
    return bias.between(positions[-sequence.num_queries :], positions[-stop:])


def gather(pages: KV, blocks: Tensor, dtype: torch.dtype) -> KV:
    """Gather blocks [B, n] of pages as k [B, Hkv, n * block_size, D] and v, in `dtype` if they are quantized.

    Those of int4 are still rotated: rotate queries and results, which are fewer.
    """
    heads = torch.arange(pages.k.shape[1], device=blocks.device, dtype=blocks.dtype).unsqueeze(1)
    # One head of a block is contiguous: picking those puts the heads outside the tokens in a single copy.
    picked = blocks.unsqueeze(1) * len(heads) + heads  # [B, Hkv, n]
    return KV(_pick(pages.k, pages.k_scales, picked, dtype), _pick(pages.v, pages.v_scales, picked, dtype))


def _pick(pages: Tensor, scales: Tensor | None, picked: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather entries [B, Hkv, n] of pages seen as [num_blocks * Hkv, block_size, D] -> [B, Hkv, n * block_size, D]."""
    found = pages.flatten(0, 1).index_select(0, picked.flatten())
    found = found.view(*picked.shape[:2], -1, pages.shape[3])
    if scales is None:
        return found
    factors = scales.flatten(0, 1).index_select(0, picked.flatten()).view(*found.shape[:3], *scales.shape[3:])
    return dequantize(found, factors, dtype)


def rotated_like(x: Tensor, pages: Tensor) -> Tensor:
    """Rotate queries [N, Hq, D] for pages of rotated keys, or rotate results [N, Hq, Dv] of rotated values back."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return rotate(x.to(exact)).to(x.dtype) if pages.dtype is INT4 else x
