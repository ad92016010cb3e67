"""The keys that a query may see: by causal order, a sliding window, and a mask on top."""

from __future__ import annotations

import torch
from torch import Tensor


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
