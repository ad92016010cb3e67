"""Cut attention into blocks of query rows, each with only the keys that it may see."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.layouts import KV, AttentionOptions
from .masking import restrict, visible, visible_keys


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
