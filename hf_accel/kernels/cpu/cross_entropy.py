"""The cross entropy of rows of logits, and its gradient, which may take the place of the logits."""

from __future__ import annotations

from ctypes import Structure
from typing import NamedTuple

import torch
from torch import Tensor

from .library import DTYPES, fields, kernel, threads


class CrossEntropyCall(Structure):
    _fields_ = fields(
        pointers="logits labels largest sums losses gradient", sizes="stride gradient_stride rows size",
        floats="factor", ints="dtype threads",
    )  # fmt: skip


_cross_entropy = kernel("cross_entropy", CrossEntropyCall)


class RowStatistics(NamedTuple):
    """The statistics of rows, all [N] float32, and zero in a row without a label.

    losses: the cross entropies. largest: the largest logits. sums: the sums of exp(logit - largest).
    """

    losses: Tensor
    largest: Tensor
    sums: Tensor


def cross_entropy(logits: Tensor, labels: Tensor) -> RowStatistics:
    """Compute the cross entropies of logits [N, V] of a dtype of FLOATS, the last stride 1.

    labels: int64 [N], contiguous, below V; negative for a row without one. Who differentiates gives the logits and the
    result to `cross_entropy_gradient`.
    """
    found = RowStatistics(*(logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3)))
    _call(logits, labels, found, None, factor=0.0)
    return found


def cross_entropy_gradient(logits: Tensor, labels: Tensor, statistics: RowStatistics, factor: float) -> None:
    """Replace the logits, in place, by the gradient of the sum of the cross entropies in them, times a factor.

    It is computed in float32 and rounded once, and zeros where a row has no label.
    """
    _call(logits, labels, statistics, logits, factor=factor)


def _call(logits: Tensor, labels: Tensor, found: RowStatistics, gradient: Tensor | None, *, factor: float) -> None:
    stride, rows, size = logits.stride(0), *logits.shape
    _cross_entropy(
        logits.data_ptr(), labels.data_ptr(), found.largest.data_ptr(), found.sums.data_ptr(), found.losses.data_ptr(),
        0 if gradient is None else gradient.data_ptr(), stride, stride, rows, size, factor, DTYPES[logits.dtype],
        threads(),
    )  # fmt: skip
