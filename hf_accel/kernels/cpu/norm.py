"""RMSNorm and LayerNorm over the last dimension, with the residual sum before them if there is one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import byref, c_void_p

import torch
from torch import Tensor

from .library import DTYPES, function, threads
from .structs import NormCall
from .tensors import as_rows, refuse_gradients

RMS, LAYER = 0, 1


@functools.cache
def _norm() -> Callable[..., None]:
    return function("norm", c_void_p)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    round_first: bool = True,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * (offset + weight), and the sum that was normalized (x itself without a residual).

    x, residual [..., H] of one float dtype, weight [H] of any. With a residual, x + residual rounded to the dtype is
    normalized. round_first: the normalized x is rounded to the dtype before the product, as in Llama; without it, and
    with offset=1, as in Gemma. The sum of squares is added in the order of torch's, so that the bits are those of
    transformers' modules. Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return _run(RMS, x, weight, None, eps, offset, round_first, residual)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) * weight + bias, rounded once, and the sum that was normalized.

    As rms_norm otherwise. torch's layer_norm adds its moments in another order: results are within float32's
    rounding of it, and equal to the modules that are written out as mean, pow and rsqrt (Cohere).
    """
    return _run(LAYER, x, weight, bias, eps, 0.0, False, residual)


def _run(
    kind: int, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, round_first: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_gradients("norm", x, weight, bias, residual)
    x, stride = as_rows(x)
    size = x.shape[-1]
    dtype = x.dtype
    code = DTYPES[dtype]
    out_dtype = dtype
    if round_first and weight is not None and weight.dtype is not dtype:
        out_dtype = torch.promote_types(dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=out_dtype)
    total, residual_stride = x, 0
    if residual is not None:
        residual, residual_stride = as_rows(residual)
        total = torch.empty(x.shape, dtype=dtype)
    weight, bias = _packed(weight), _packed(bias)
    call = NormCall(
        x.data_ptr(), residual if residual is None else residual.data_ptr(), total.data_ptr(), out.data_ptr(),
        weight if weight is None else weight.data_ptr(), bias if bias is None else bias.data_ptr(),
        stride, residual_stride, x.numel() // size if size else 0, size, eps, offset,
        kind, round_first, code, 0 if weight is None else DTYPES[weight.dtype],
        0 if bias is None else DTYPES[bias.dtype], DTYPES[out_dtype], threads(),
    )  # fmt: skip
    _norm()(byref(call))
    return out, total


def _packed(vector: Tensor | None) -> Tensor | None:
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()
