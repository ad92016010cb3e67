"""The keys that a query may see, by causal order, a window and a mask, and attention in blocks that have no others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.layouts import KV, AttentionOptions


def visible(query_positions: Tensor, key_positions: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """[..., Q] and [..., T] integer positions -> bool [..., Q, T], True where the query sees the key."""
    age = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    seen = age >= 0 if causal else torch.ones_like(age, dtype=torch.bool)
    return seen if window is None else seen & (age < window)


def visible_keys(queries: range, *, num_queries: int, num_keys: int, causal: bool, window: int | None) -> range:
    """Return the smallest range with every key that one of `queries` (of num_queries, bottom-right) may see."""
    offset = num_keys - num_queries
    stop = min(max(offset + queries.stop, 0), num_keys) if causal else num_keys
    start = 0 if window is None else min(max(offset + queries.start - window + 1, 0), stop)
    return range(start, stop)


def restrict(mask: Tensor | None, seen: Tensor) -> Tensor:
    """Return `mask` (bool, or floating and added) that also hides what is not `seen`."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def hidden(mask: Tensor) -> Tensor:
    """Return True where `mask` hides a key completely."""
    return ~mask if mask.dtype == torch.bool else mask.isneginf()


def apply_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """Add a floating mask to the scores, and set hidden ones to -inf."""
    return (scores + mask if mask.is_floating_point() else scores).masked_fill(hidden(mask), float("-inf"))


def row_blocks(
    q: Tensor, kv: KV, mask: Tensor | None, options: AttentionOptions, *, size: int
) -> Iterator[tuple[Tensor, KV, Tensor | None]]:
    """Cut q [B, H, Q, D] into blocks of `size` rows; each block's mask replaces causal and window."""
    num_queries, num_keys = q.shape[2], kv.k.shape[2]
    causal, window = options.causal, options.window
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], num_queries, num_keys)
    for start in range(0, max(num_queries, 1), size):
        rows = range(start, min(start + size, num_queries))
        keys = visible_keys(rows, num_queries=num_queries, num_keys=num_keys, causal=causal, window=window)
        block_mask = None if mask is None else cut(cut(mask, rows, dim=-2), keys, dim=-1)
        if len(rows) > 1 and (causal or window is not None):  # a single row sees all of its keys
            positions = torch.arange(num_keys - num_queries, num_keys, device=q.device)[rows.start : rows.stop]
            seen = visible(
                positions, torch.arange(keys.start, keys.stop, device=q.device), causal=causal, window=window
            )
            block_mask = restrict(block_mask, seen)
        yield cut(q, rows, dim=2), KV(cut(kv.k, keys, dim=2), cut(kv.v, keys, dim=2)), block_mask


def cut(x: Tensor, span: range, *, dim: int) -> Tensor:
    return x if len(span) == x.shape[dim] else x.narrow(dim, span.start, len(span))
