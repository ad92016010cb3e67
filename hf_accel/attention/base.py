"""What every attention backend offers, and what it is asked before it is chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What the attention of a group of layers needs, known before any tensor is there.

    window: keys a query sees, itself included; None for all. softcap: bound of the scores (Gemma-2).
    sinks: one learned extra logit per query head (gpt-oss). quantized_kv: int8 or fp8 pages. dropout: on the weights.
    """

    dtype: torch.dtype
    device_type: str
    head_dim: int
    value_dim: int
    num_heads: int
    num_kv_heads: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    quantized_kv: bool = False
    dropout: bool = False


class AttentionBackend(ABC):
    """softmax(softcap(scale * q k^T) + mask) v over three layouts of the same operands.

    Heads: Hq query heads read Hkv key heads in order, G = Hq / Hkv of them each; K and V are never repeated.
    Causal is bottom-right: query i of Q stands at position p = T - Q + i of T keys and sees the keys up to p.
    window W leaves it the keys j with p - j < W. sinks [Hq] adds exp(sink) to the softmax denominator.
    A query that sees no key gets zeros. Results have the dtype of q.
    """

    name: str

    @abstractmethod
    def refuses(self, spec: AttentionSpec) -> str | None:
        """None, or the clause that says why this backend cannot serve `spec`."""

    @abstractmethod
    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """q [B, Hq, Q, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] -> [B, Q, Hq, Dv]; differentiable.

        mask: broadcastable to [B, Hq, Q, T], bool (True attends) or floating (added; -inf hides).
        mask, causal and window combine: a key must be visible to all of them.
        """

    def packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Sequences end to end: q [N, Hq, D], k [M, Hkv, D], v [M, Hkv, Dv] -> [N, Hq, Dv]; differentiable.

        cu_q, cu_k [B + 1] int32: where each sequence starts, and the end of the last; max_q, max_k: the longest.
        """
        starts, key_starts = cu_q.tolist(), cu_k.tolist()
        parts = [q.new_zeros(0, q.shape[1], v.shape[2])]
        for queries, keys in zip(pairwise(starts), pairwise(key_starts), strict=True):
            part = self.dense(
                *(_one_sequence(x, span) for x, span in ((q, queries), (k, keys), (v, keys))),
                mask=None,
                causal=causal,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                dropout=dropout,
            )
            parts.append(part[0])
        return torch.cat(parts)

    @abstractmethod
    def paged(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        k_scales: Tensor | None,
        v_scales: Tensor | None,
        block_table: Tensor,
        cu_q: Tensor,
        kv_len: Tensor,
        max_q: int,
        max_kv: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:  # Tensor, or (Tensor, Tensor) with return_lse
        """Ragged queries [N, Hq, D] over a paged cache, causal -> [N, Hq, Dv] (, lse [N, Hq] float32).

        k_pages [blocks, Hkv, block_size, D], v_pages [.., Dv]: contiguous, in q's dtype, or int8 or float8_e4m3fn with
        k_scales and v_scales [blocks, Hkv, block_size]. Slots that hold no visible key are never used, whatever is in
        them.
        block_table [B, max_blocks] int32: entries that hold no visible key are never read.
        cu_q [B + 1] int32: where each sequence's queries start; kv_len [B] int32: its keys, those of the queries
        included; both may be 0. max_q, max_kv: the largest of each (bounds for kernels; not checked).
        lse: natural log of the softmax denominator, the sink's share included; -inf where that is 0. Parts over
        disjoint keys merge by weights exp(lse); give sinks to one of them only.
        """


def empty_lse(q: Tensor, sinks: Tensor | None) -> Tensor:
    """What the queries q [N, Hq, D] start from before they have seen a key: [N, Hq] float32."""
    if sinks is None:
        return torch.full(q.shape[:2], float("-inf"), device=q.device)
    return sinks.float().expand(q.shape[:2]).clone()


def _one_sequence(packed: Tensor, span: tuple[int, int]) -> Tensor:
    """Rows `span` of [N, H, D] as a batch of one, [1, H, n, D]."""
    return packed[slice(*span)].transpose(0, 1).unsqueeze(0)
