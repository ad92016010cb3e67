"""Drawing from rows of weights by the inverse of their cumulative sum."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor


def inverse_draw(weights: Tensor, uniforms: abc.Sequence[float]) -> list[int]:
    """From each row of [n, V] (not negative, any sum above 0) the first index where the cumulative sum passes u times
    the whole, u in [0, 1). An index of weight 0 is never drawn."""
    if not len(weights):
        return []
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    u = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None]
    below = torch.nextafter(total, torch.zeros_like(total))  # u * total may round up to total
    indices = torch.searchsorted(cumulative, torch.minimum(u * total, below), right=True)
    indices = indices.clamp_(max=weights.shape[1] - 1)
    if weights.device.type == "cpu":
        return [int(index) for index in indices[:, 0].tolist()]
    return _checked(weights, indices, uniforms)


def _checked(weights: Tensor, indices: Tensor, uniforms: abc.Sequence[float]) -> list[int]:
    """A parallel cumulative sum need not be monotonic: draw again, one after the other, where it hit a weight of 0."""
    pairs = torch.stack([indices[:, 0].double(), weights.gather(1, indices)[:, 0].double()]).tolist()
    drawn = [int(index) for index in pairs[0]]
    missed = [row for row, weight in enumerate(pairs[1]) if not weight > 0]
    if missed:
        again = inverse_draw(weights[missed].cpu(), [uniforms[row] for row in missed])
        for row, index in zip(missed, again, strict=True):
            drawn[row] = index
    return drawn
