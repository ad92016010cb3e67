"""Draws indices from rows of weights by inverting the cumulative sum."""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right
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
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1).cpu().contiguous()
    # Searched by Python, in torch's memory: that takes half the time of as many calls of torch.
    rows = _rows(sums)
    targets = [u * row[-1] for u, row in zip(uniforms, rows, strict=True)]
    found = [_first_beyond(row, target) for row, target in zip(rows, targets, strict=True)]
    inner = blocks[range(len(found)), found].cumsum(-1, dtype=torch.float64).cpu().contiguous()
    last = weights.shape[1] - 1
    indices = []
    for row, block, target, within in zip(rows, found, targets, _rows(inner), strict=True):
        before = row[block - 1] if block else 0.0
        indices.append(min(block * BLOCK + _first_beyond(within, target - before), last))
    return indices if weights.device.type == "cpu" else _checked(weights, indices, uniforms)


def _rows(tensor: Tensor) -> list[ctypes.Array[ctypes.c_double]]:
    """Return the memory of each row of a contiguous tensor [n, k] float64. It is valid as long as the tensor is."""
    row = ctypes.c_double * tensor.shape[1]
    return [row.from_address(tensor.data_ptr() + index * ctypes.sizeof(row)) for index in range(len(tensor))]


def _first_beyond(cumulative: ctypes.Array[ctypes.c_double], target: float) -> int:
    """Return the first index at which `cumulative` exceeds `target`.

    Rounding may have made the target as large as the last sum; it is then reduced to slightly less.
    """
    below = math.nextafter(cumulative[-1], 0.0)
    return min(bisect_right(cumulative, min(target, below)), len(cumulative) - 1)


def _checked(weights: Tensor, indices: list[int], uniforms: abc.Sequence[float]) -> list[int]:
    """Return the indices, but draw again on the CPU where an index has a weight of 0.

    A parallel cumulative sum need not be monotonic, so this can happen.
    """
    drawn = list(indices)
    found = weights[range(len(drawn)), drawn].tolist()
    missed = [row for row, weight in enumerate(found) if not weight > 0]
    if missed:
        again = inverse_draw(weights[missed].cpu(), [uniforms[row] for row in missed])
        for row, index in zip(missed, again, strict=True):
            drawn[row] = index
    return drawn
