"""Convolutions of each channel over the rows of sequences that stand end to end, as in a Conformer."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof

import torch
from torch import Tensor

from .library import ACTIVATIONS, DTYPES, as_rows, fields, kernel, refuse_gradients, threads


class RowNorm(Structure):
    _fields_ = fields(pointers="mean variance weight bias", floats="eps")


class RowConvCall(Structure):
    _fields_ = fields(
        pointers="x weight bias norm out starts lengths", sizes="x_stride out_stride sequences channels length before",
        ints="activation dtype threads",
    )  # fmt: skip


_row_conv = kernel("row_conv", RowConvCall)


def row_norm(tensors: Sequence[Tensor], eps: float) -> RowNorm:
    """Describe a BatchNorm in use: its means, variances, weights and biases, contiguous, which must stay in memory."""
    return RowNorm(*(each.data_ptr() for each in tensors), eps)


def row_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: tuple[Tensor, Tensor | None], *, before: int,
    behind: tuple[RowNorm | None, str | None] = (None, None),
) -> Tensor:  # fmt: skip
    """Compute act(norm(conv(x))): sums of `before` rows ahead of a row, of its own and of those behind it, by channel.

    x: [N, C]. weight: [C, 1, L]. bias: [C] or None. All are of one dtype of FLOATS, as those of the norm are. rows:
    the places where sequences begin, int32 [B + 1], and how many of each one's rows count, int32 [B], or None for all:
    others count as zeros, as those next to a sequence do. behind: the norm and the activation, if there are any.
    Returns [N, C]. Raises UnsupportedError if a gradient is needed.
    """
    refuse_gradients("row_conv", x, weight, bias)
    (x, stride), weight, (starts, lengths), (norm, activation) = as_rows(x), weight.contiguous(), rows, behind
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _row_conv(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        0 if norm is None else addressof(norm), out.data_ptr(), starts.data_ptr(),
        0 if lengths is None else lengths.data_ptr(), stride, x.shape[1], len(starts) - 1, x.shape[1],
        weight.shape[-1], before, -1 if activation is None else ACTIVATIONS[activation], DTYPES[x.dtype], threads(),
    )  # fmt: skip
    return out
