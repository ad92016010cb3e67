"""Draws indices from rows of weights by inverting the cumulative sum."""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right
from collections import abc

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....kernels import cpu
from ....kernels.cpu.draws import INVERSE, Draws, drawn_from
from ....tensors import Unread, is_remote, known

SEARCH_BLOCK = 128  # weights per block: the cumulative sum is over block sums, and then within one block


def inverse_draw(weights: Tensor, uniforms: Tensor) -> Unread[list[int]]:
    """Draw an index from each row of weights [n, V], with a probability proportional to its weight.

    Weights are not negative, and the sum of a row is above 0. uniforms: numbers in [0, 1), [n] float64, on the same
    device. The index is the first at which the cumulative sum exceeds uniforms[i] times the row's sum. An index of
    weight 0 is never drawn. If there are numbers to read, the first n of them are the indices as first drawn.
    """
    if not len(weights):
        return known([])
    if weights.is_cpu and weights.dtype is torch.float32 and cpu.refusal() is None:
        tokens: list[int] = drawn_from(weights, Draws(INVERSE), uniforms.double()).tolist()
        return known([max(token, 0) for token in tokens])  # where weights are no numbers, there is no token
    missing = -weights.shape[1] % SEARCH_BLOCK
    blocks = (pad(weights, (0, missing)) if missing else weights).reshape(len(weights), -1, SEARCH_BLOCK)
    if is_remote(weights):
        return _drawn_on_device(weights, blocks, uniforms)
    return known(_drawn_on_host(weights, blocks, uniforms.tolist()))


def _drawn_on_host(weights: Tensor, blocks: Tensor, uniforms: abc.Sequence[float]) -> list[int]:
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
        indices.append(min(block * SEARCH_BLOCK + _first_beyond(within, target - before), last))
    return indices


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


def _drawn_on_device(weights: Tensor, blocks: Tensor, uniforms: Tensor) -> Unread[list[int]]:
    """Draw as inverse_draw does. blocks: weights in blocks, [n, V / SEARCH_BLOCK, SEARCH_BLOCK]."""
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    targets = uniforms[:, None] * sums[:, -1:]
    found = _first_beyond_each(sums, targets)
    before = pad(sums, (1, 0)).gather(1, found)
    inner = blocks.gather(1, found[:, :, None].expand(-1, -1, SEARCH_BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    indices = found * SEARCH_BLOCK + _first_beyond_each(inner, targets - before)
    indices = indices.clamp(max=weights.shape[1] - 1)
    is_possible = weights.gather(1, indices) > 0
    both = torch.cat([indices[:, 0], is_possible[:, 0].long()])
    return Unread(both, lambda numbers: _checked(weights, numbers, uniforms))


def _first_beyond_each(cumulative: Tensor, targets: Tensor) -> Tensor:
    """Return the first index at which each row of `cumulative` [n, k] exceeds its target [n, 1], as [n, 1]."""
    last = cumulative[:, -1:]
    below = torch.minimum(targets, last.nextafter(torch.zeros_like(last)))
    return (cumulative <= below).sum(-1, keepdim=True).clamp(max=cumulative.shape[1] - 1)


def _checked(weights: Tensor, numbers: list[int], uniforms: Tensor) -> list[int]:
    """Return the indices, but draw again on the CPU where the weight is 0.

    numbers: n indices, and then for each whether its weight is above 0. A parallel cumulative sum need not be
    monotonic, so that it can be 0.
    """
    indices = numbers[: len(weights)]
    missed = [row for row, is_possible in enumerate(numbers[len(weights) :]) if not is_possible]
    if missed:
        again = inverse_draw(weights[missed].cpu(), uniforms[missed].cpu())
        for row, index in zip(missed, again.read(), strict=True):
            indices[row] = index
    return indices
