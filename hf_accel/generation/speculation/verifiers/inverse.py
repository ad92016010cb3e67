"""Draws indices from rows of weights by inverting the cumulative sum."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128  # weights per block: the cumulative sum is over block sums, and then within one block


def inverse_draw(weights: Tensor, uniforms: abc.Sequence[float]) -> list[int]:
    """Draw an index from each row of weights [n, V], with a probability proportional to its weight.

    Weights are not negative, and the sum of a row is above 0. uniforms: n numbers in [0, 1). The index is the first at
    which the cumulative sum exceeds uniforms[i] times the row's sum. An index of weight 0 is never drawn.
    """
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
    """Return the first index [n, 1] of each row at which `cumulative` [n, k] exceeds `target` [n, 1].

    Rounding may have made the target as large as the last sum; it is then reduced to slightly less.
    """
    whole = cumulative[:, -1:].contiguous()
    below = torch.nextafter(whole, torch.zeros_like(whole))
    found = torch.searchsorted(cumulative, torch.minimum(target, below), right=True)
    return found.clamp_(max=cumulative.shape[1] - 1)


def _checked(weights: Tensor, indices: Tensor, uniforms: abc.Sequence[float]) -> list[int]:
    """Return the indices, but draw again on the CPU where an index has a weight of 0.

    A parallel cumulative sum need not be monotonic, so this can happen.
    """
    pairs = torch.stack([indices[:, 0].double(), weights.gather(1, indices)[:, 0].double()]).tolist()
    drawn = [int(index) for index in pairs[0]]
    missed = [row for row, weight in enumerate(pairs[1]) if not weight > 0]
    if missed:
        again = inverse_draw(weights[missed].cpu(), [uniforms[row] for row in missed])
        for row, index in zip(missed, again, strict=True):
            drawn[row] = index
    return drawn
