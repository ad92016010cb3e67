"""The largest logits of each row, without a float32 copy of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import byref, c_void_p

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .library import DTYPES, function, threads
from .structs import VocabularyCall
from .tensors import as_rows, refuse_gradients


@functools.cache
def _argmax() -> Callable[..., None]:
    return function("argmax", c_void_p)


@functools.cache
def _topk() -> Callable[..., None]:
    return function("topk", c_void_p)


def argmax(logits: Tensor) -> Tensor:
    """The index of each row's largest, [..., V] -> int64 [...]; of equals the lowest; NaN counts as the largest."""
    if not logits.shape[-1]:
        raise UnsupportedError("argmax: a row of no logits has no largest")
    logits, stride = as_rows(logits)
    size = logits.shape[-1]
    indices = torch.empty(logits.shape[:-1], dtype=torch.int64)
    call = VocabularyCall(
        logits.data_ptr(), stride, indices.numel(), size, 1, None, indices.data_ptr(), DTYPES[logits.dtype],
        threads(),
    )  # fmt: skip
    _argmax()(byref(call))
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
    call = VocabularyCall(
        logits.data_ptr(), stride, indices.numel() // k if k else 0, logits.shape[-1], k, values.data_ptr(),
        indices.data_ptr(), DTYPES[logits.dtype], threads(),
    )  # fmt: skip
    _topk()(byref(call))
    return values, indices
