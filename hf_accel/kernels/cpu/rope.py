"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import byref, c_void_p

import torch
from torch import Tensor

from .library import DTYPES, function, threads
from .structs import RopeCall
from .tensors import refuse_gradients


@functools.cache
def _rope() -> Callable[..., None]:
    return function("rope", c_void_p)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    round_each: bool = True,
) -> tuple[Tensor, Tensor]:
    """q * cos + rotate_half(q) * sin on the first rotary_dim numbers of each head, likewise k; new tensors.

    q, k [B, H, T, D] or [N, H, D] of one dtype, any strides but the last; the results have their memory order.
    cos, sin [B or 1, T, rotary_dim] or [N, rotary_dim]; half as many columns, where one serves both numbers of a
    pair, if rotary_dim says so. interleaved: the pairs are (0, 1), (2, 3), ..., as in GPT-J and Cohere; else (i, i +
    rotary_dim / 2), as in GPT-NeoX and Llama. round_each: both products are rounded to the dtype, as Llama's are in
    bfloat16; without it (Cohere's float()) only the result is. With tables of a wider dtype than q only the result is.
    """
    return _run(q, torch.empty_like(q), k, torch.empty_like(k), cos, sin, interleaved, rotary_dim, round_each)


def rope_(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    round_each: bool = True,
) -> tuple[Tensor, Tensor]:
    """As rope, in place; q and k may be views, for instance into one [N, (Hq + 2 Hkv) D] buffer."""
    return _run(q, q, k, k, cos, sin, interleaved, rotary_dim, round_each)


def _run(
    q: Tensor, q_out: Tensor, k: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor, interleaved: bool,
    rotary_dim: int | None, round_each: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_gradients("rope", q, k)
    if cos.stride(-1) != 1 or sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    columns = cos.shape[-1]
    rotary_dim = rotary_dim or columns
    dtype, table_dtype = q.dtype, cos.dtype
    if dtype is not table_dtype and torch.promote_types(dtype, table_dtype) is not dtype:
        round_each = False
    batch, tokens = (q.shape[0], q.shape[2]) if q.ndim == 4 else (1, q.shape[0])
    table_batch = cos.stride(0) if cos.ndim == 3 and cos.shape[0] > 1 else 0
    call = RopeCall(
        q.data_ptr(), q_out.data_ptr(), *_strides(q), *_strides(q_out), q.shape[1], q.shape[-1],
        k.data_ptr(), k_out.data_ptr(), *_strides(k), *_strides(k_out), k.shape[1], k.shape[-1],
        cos.data_ptr(), sin.data_ptr(), table_batch, cos.stride(-2), batch, tokens, rotary_dim,
        columns < rotary_dim, interleaved, round_each, DTYPES[dtype], DTYPES[table_dtype], threads(),
    )  # fmt: skip
    _rope()(byref(call))
    return q_out, k_out


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, heads and tokens."""
    strides = x.stride()
    return (strides[0], strides[1], strides[2]) if len(strides) == 4 else (0, strides[1], strides[0])
