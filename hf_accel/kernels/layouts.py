"""The operands of attention, in the layouts that caches make, backends take and kernels read."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class KV(NamedTuple):
    """K and V of one layer, in one of three layouts.

    dense: k [B, Hkv, T, D], v [B, Hkv, T, Dv]. packed: sequences end to end, k [M, Hkv, D], v [M, Hkv, Dv].
    paged: k [num_blocks, Hkv, block_size, D], v [.., Dv], contiguous; in the dtype of the queries, or in int8 or
    float8_e4m3fn with k_scales and v_scales [num_blocks, Hkv, block_size]. Pages of uint8 hold int4: numbers that are
    rotated, two in a byte, with scales [.., 2] (cache/quantized.py). K and V may be of two such dtypes.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    @property
    def is_int4(self) -> bool:
        return self.k.dtype is torch.uint8

    @property
    def key_dim(self) -> int:
        return dim_of(self.k)

    @property
    def value_dim(self) -> int:
        return dim_of(self.v)


def dim_of(pages: Tensor) -> int:
    """Return the numbers of a head in pages of keys or values."""
    return pages.shape[-1] * 2 if pages.dtype is torch.uint8 else pages.shape[-1]


class Ragged(NamedTuple):
    """B sequences whose queries stand end to end.

    cu_q [B + 1] int32: where each sequence's queries begin, and where the last ones end. kv_len [B] int32: its keys,
    those of the queries included. Both may be 0. max_q, max_kv: the largest of each (bounds for kernels; not checked).
    block_table [B, max_blocks] int32: the pages of the keys, None where these are packed.
    """

    cu_q: Tensor
    kv_len: Tensor
    max_q: int
    max_kv: int
    block_table: Tensor | None = None

    @property
    def cu_k(self) -> Tensor:
        """[B + 1] int32: where each sequence's keys begin if they are packed."""
        return F.pad(self.kv_len.cumsum(0, dtype=self.cu_q.dtype), (1, 0))

    def slots(self, block_size: int) -> Tensor:
        """Return the slots of the M keys of all sequences, end to end, [M] int64."""
        starts, table = self.cu_k.long(), self.block_table
        assert table is not None
        row = torch.arange(len(table), device=starts.device).repeat_interleave(self.kv_len.long())
        places = torch.arange(len(row), device=starts.device) - starts[row]
        return table.long()[row, places // block_size] * block_size + places % block_size

    def slots_before(self, count: int, block_size: int) -> Tensor:
        """Return the slots of the last `count` tokens up to each of the N tokens, in order, [N, count] int64.

        -1 stands before a sequence's first token.
        """
        cu_q, lengths, table = self.cu_q.long(), self.kv_len.long(), self.block_table
        assert table is not None
        counts = cu_q[1:] - cu_q[:-1]
        row = torch.arange(len(counts), device=cu_q.device).repeat_interleave(counts)
        place = torch.arange(len(row), device=cu_q.device) - cu_q[row] + (lengths - counts)[row]
        places = place[:, None] - torch.arange(count - 1, -1, -1, device=cu_q.device)
        blocks = table.long()[row[:, None], places.clamp(min=0) // block_size]
        return (blocks * block_size + places % block_size).masked_fill_(places < 0, -1)


class PositionBias(NamedTuple):
    """Numbers that are added to the scores by positions, which begin at 0 in each sequence.

    table: float32 [Hq, M]. by_distance: whether its column M - 1 - d is for keys that stand d tokens before the query
    (d >= 0); if not, its column p is for the key at position p. M is at least the length of the longest sequence.
    The method is ALiBi (Press et al. 2021, "Train Short, Test Long", arXiv 2108.12409), or any other such numbers.
    """

    table: Tensor
    by_distance: bool

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the numbers for queries at positions [..., Q] and keys at [..., T], [..., Hq, Q, T]; of keys behind
        the query, any numbers."""
        if not self.by_distance:
            columns = keys.unsqueeze(-2).expand(*queries.shape, keys.shape[-1])
        else:
            columns = self.table.shape[1] - 1 - (queries.unsqueeze(-1) - keys.unsqueeze(-2))
        found = self.table[:, columns.clamp(0, self.table.shape[1] - 1)]  # [Hq, ..., Q, T]
        return found.movedim(0, -3)


class AttentionOptions(NamedTuple):
    """The options of attention over q, k and v, besides the mask of a call.

    scale: of the scores. causal: bottom-right; query i of Q stands at position p = T - Q + i of T keys and sees the
    keys up to p. window: keys a query sees, itself included; None for all. softcap: bound of the scores (Gemma-2).
    sinks [Hq]: exp(sink) is added to the softmax denominator (gpt-oss). dropout: of the weights. bias: it is added
    after the scale and the softcap; only attention over pages has one.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    bias: PositionBias | None = None
