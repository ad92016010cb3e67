"""argmax and top-k of logits, without converting them to float32."""

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
    """Return the index of the largest logit of each row of [..., V], [...] int64; the lowest index among equal logits.

    NaN counts as the largest. Raises UnsupportedError if V is 0.
    """
    if not logits.shape[-1]:
        raise UnsupportedError("argmax: a row of no logits has no largest")
    logits, stride = as_rows(logits)
    size = logits.shape[-1]
    indices = logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    _argmax(
        logits.data_ptr(), stride, indices.numel(), size, 1, 0, indices.data_ptr(), DTYPES[logits.dtype], threads()
    )
    return indices


def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row of [..., V] and their indices, both [..., k], indices int64.

    They are in descending order; equal logits are in the order of their indices. NaN counts as the largest. Raises
    UnsupportedError if k is not from 0 to V, and if a gradient is needed.
    """
    refuse_gradients("topk", logits)
    if not 0 <= k <= logits.shape[-1]:
        raise UnsupportedError(f"topk: k={k} of {logits.shape[-1]} logits; choose k from 0 to that number")
    logits, stride = as_rows(logits)
    values = logits.new_empty((*logits.shape[:-1], k))
    indices = values.new_empty(values.shape, dtype=torch.int64)
    _topk(
        logits.data_ptr(), stride, indices.numel() // k if k else 0, logits.shape[-1], k, values.data_ptr(),
        indices.data_ptr(), DTYPES[logits.dtype], threads(),
    )  # fmt: skip
    return values, indices
