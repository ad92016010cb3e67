"""The largest logits of each row, without a float32 copy of them."""

from __future__ import annotations

from ctypes import Structure

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .library import DTYPES, as_rows, kernel, refuse_gradients, threads
from .structs import fields


class LogitsCall(Structure):
    _fields_ = fields(pointers="logits", sizes="stride rows size k", pointers_="values indices", ints="dtype threads")


_argmax = kernel("argmax", LogitsCall)
_topk = kernel("topk", LogitsCall)


def argmax(logits: Tensor) -> Tensor:
    """The index of each row's largest, [..., V] -> int64 [...]; of equals the lowest; NaN counts as the largest."""
    if not logits.shape[-1]:
        raise UnsupportedError("argmax: a row of no logits has no largest")
    logits, stride = as_rows(logits)
    size = logits.shape[-1]
    indices = torch.empty(logits.shape[:-1], dtype=torch.int64)
    _argmax(
        logits.data_ptr(), stride, indices.numel(), size, 1, 0, indices.data_ptr(), DTYPES[logits.dtype], threads()
    )
    return indices


def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row [..., V], descending, equals by lowest index -> (values, int64 indices) [..., k].

    NaN counts as the largest. Raises UnsupportedError for k beyond V.
    """
    refuse_gradients("topk", logits)
    if not 0 <= k <= logits.shape[-1]:
        raise UnsupportedError(f"topk: k={k} of {logits.shape[-1]} logits; choose k from 0 to that number")
    logits, stride = as_rows(logits)
    values = torch.empty((*logits.shape[:-1], k), dtype=logits.dtype)
    indices = torch.empty(values.shape, dtype=torch.int64)
    _topk(
        logits.data_ptr(), stride, indices.numel() // k if k else 0, logits.shape[-1], k, values.data_ptr(),
        indices.data_ptr(), DTYPES[logits.dtype], threads(),
    )  # fmt: skip
    return values, indices
