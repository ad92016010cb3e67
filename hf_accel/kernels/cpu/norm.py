"""RMSNorm over the last dimension."""

from __future__ import annotations

from ctypes import Structure

import torch
from torch import Tensor

from .library import DTYPES, as_rows, kernel, refuse_gradients, threads
from .structs import fields


class NormCall(Structure):
    _fields_ = fields(
        pointers="x out weight", sizes="x_stride rows size", floats="eps offset",
        ints="round_first dtype weight_dtype out_dtype threads",
    )  # fmt: skip


_norm = kernel("norm", NormCall)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, round_first: bool = True) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) -> [..., H]

    x [..., H] of a float dtype, weight [H] of any. round_first: the normalized x is rounded to the dtype before the
    product, as in Llama; without it, and with offset=1, as in Gemma. The sum of squares is added in the order of
    torch's, so that the bits are those of transformers' modules. Zhang and Sennrich, "Root Mean Square Layer
    Normalization", 2019.
    """
    refuse_gradients("norm", x, weight)
    x, stride = as_rows(x)
    size, dtype = x.shape[-1], x.dtype
    out_dtype = torch.promote_types(dtype, weight.dtype) if round_first and weight.dtype is not dtype else dtype
    out = torch.empty(x.shape, dtype=out_dtype)
    weight = weight if weight.is_contiguous() else weight.contiguous()
    _norm(
        x.data_ptr(), out.data_ptr(), weight.data_ptr(), stride, x.numel() // size if size else 0, size, eps, offset,
        round_first, DTYPES[dtype], DTYPES[weight.dtype], DTYPES[out_dtype], threads(),
    )  # fmt: skip
    return out
