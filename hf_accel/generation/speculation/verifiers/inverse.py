"""Drawing from rows of weights by the inverse of their cumulative sum."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128  # weights that are summed before any cumulative sum: only one block of them is looked into


def inverse_draw(weights: Tensor, uniforms: abc.Sequence[float]) -> list[int]:
    """From each row of [n, V] (not negative, any sum above 0) the first index where the cumulative sum passes u times
    the whole, u in [0, 1). An index of weight 0 is never drawn."""
    if not len(weights):
        return []
    missing = -weights.shape[1] % BLOCK
    blocks = (pad(weights, (0, missing)) if missing else weights).reshape(len(weights), -1, BLOCK)
    u = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None]
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = u * sums[:, -1:]
    block = _first_beyond(sums, target)
    before = sums.gather(1, (block - 1).clamp(min=0)).where(block > 0, 0)
    inner = blocks.take_along_dim(block[:, :, None], 1)[:, 0].cumsum(-1, dtype=torch.float64)
    indices = (block * BLOCK + _first_beyond(inner, target - before)).clamp_(max=weights.shape[1] - 1)
    if weights.device.type == "cpu":
        return [int(index) for index in indices[:, 0].tolist()]
    return _checked(weights, indices, uniforms)


def _first_beyond(cumulative: Tensor, target: Tensor) -> Tensor:
    """[n, 1]; a target that rounding has brought to the whole or beyond counts as a little less."""
    whole = cumulative[:, -1:].contiguous()
    below = torch.nextafter(whole, torch.zeros_like(whole))
    found = torch.searchsorted(cumulative, torch.minimum(target, below), right=True)
    return found.clamp_(max=cumulative.shape[1] - 1)


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
