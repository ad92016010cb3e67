"""K and V in fewer bits: levels, and a scale for each token and head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# The dtypes that quantized pages may have, with the largest level of each. Bytes hold two levels of 4 bits, from -7.5
# to 7.5 in steps of 1; the first of the two is in the low bits.
INT4 = torch.uint8
LARGEST_LEVELS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, INT4: 7.5}


class PageDtypes(NamedTuple):
    """The dtypes of quantized pages, two of LARGEST_LEVELS."""

    keys: torch.dtype
    values: torch.dtype

    @property
    def differ(self) -> bool:
        return self.keys is not self.values


# The dtypes of pages by the names that users type. Scores of a model depend on keys more than results on values: of
# what is lost with 4 bits, most is lost with the keys.
QUANTIZED = {
    "int8": PageDtypes(torch.int8, torch.int8),
    "fp8": PageDtypes(torch.float8_e4m3fn, torch.float8_e4m3fn),
    "int4": PageDtypes(INT4, INT4),
    "int8-int4": PageDtypes(torch.int8, INT4),
}
# The dtypes of scales that are not the dtype of K and V: in half precision, those of small K would lose bits.
SCALE_DTYPES = {torch.float16: torch.float32}


def dims_refusal(key_dim: int, value_dim: int, dtypes: PageDtypes) -> str | None:
    """Return why pages of these dtypes cannot hold keys and values of such heads, as a clause; None if they can."""
    return dim_refusal(key_dim, dtypes.keys) or dim_refusal(value_dim, dtypes.values)


def dim_refusal(dim: int, dtype: torch.dtype | None) -> str | None:
    """Return why pages of this dtype cannot hold heads of `dim` numbers, as one clause; None if they can."""
    if dtype is INT4 and dim % 2:
        return f"a byte of int4 keys and values holds two numbers, and a head has {dim}; take 'int8' for them"
    return None


def stored_columns(dim: int, dtype: torch.dtype) -> int:
    """The elements of a page of this dtype that hold a head of `dim` numbers."""
    return dim // 2 if dtype is INT4 else dim


def head_bytes(dim: int, dtype: torch.dtype, quantized: torch.dtype | None) -> int:
    """Return the bytes of one head of a token's K or V with its scales; it has `dim` numbers, computed in `dtype`."""
    if quantized is None:
        return dim * dtype.itemsize
    scale = SCALE_DTYPES.get(dtype, dtype).itemsize
    return stored_columns(dim, quantized) * quantized.itemsize + (2 * scale if quantized is INT4 else scale)


def quantize(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize states [N, H, D]: symmetrically by their largest absolute value, for INT4 by their range.

    Returns levels [N, H, D] of `dtype`, one of LARGEST_LEVELS, and scales [N, H] of the dtype of `states` or what
    SCALE_DTYPES says. The scale of all zeros is 0. INT4 has levels [N, H, D / 2] of what is rotated, and scales
    [N, H, 2]: the second number is added to the levels before they are multiplied by the first.
    """
    largest, scale_dtype = LARGEST_LEVELS[dtype], SCALE_DTYPES.get(states.dtype, states.dtype)
    if dtype is INT4:
        return _quantize_range(rotate(states.float()), scale_dtype)
    numbers = states.float()
    scales = _divided(numbers.abs().amax(-1), largest).to(scale_dtype)
    levels = numbers / scales.float().masked_fill(scales == 0, 1).unsqueeze(-1)
    levels = levels.round() if dtype == torch.int8 else levels
    return levels.clamp(-largest, largest).nan_to_num(0).to(dtype), scales


def _divided(x: Tensor, number: float) -> Tensor:
    """Divide as a CPU does: by a number, torch multiplies on a GPU, by its rounded inverse."""
    return x / torch.full_like(x, number)


def _quantize_range(numbers: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    low, high = numbers.aminmax(dim=-1)
    middle = (low + high) * 0.5
    scales = _divided(high - low, 15).to(scale_dtype)
    # Equal numbers have no range: they are all at the level 0.5, which with a shift of 0.5 is 1.
    equal = scales == 0
    scales = torch.where(equal, middle.to(scale_dtype), scales)
    shifts = torch.where(equal, 0.5, middle / scales.float()).to(scale_dtype).nan_to_num(0, 0, 0)
    levels = numbers / scales.float().masked_fill(scales == 0, 1).unsqueeze(-1) - shifts.float().unsqueeze(-1)
    nibbles = (levels + LARGEST_LEVELS[INT4]).round().clamp(0, 15).nan_to_num(0).to(torch.uint8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4, torch.stack((scales, shifts), -1)


def dequantize(levels: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert levels and scales of quantize() back to [..., D] of `dtype`; those of INT4 stay rotated."""
    wide = torch.promote_types(dtype, scales.dtype)
    if levels.dtype is not INT4:
        return (levels.to(wide) * scales.unsqueeze(-1).to(wide)).to(dtype)
    wide = torch.promote_types(wide, torch.float32)
    numbers = torch.stack((levels & 15, levels >> 4), -1).flatten(-2).to(wide) - LARGEST_LEVELS[INT4]
    factors, shifts = scales.to(wide).unsqueeze(-2).unbind(-1)
    return ((numbers + shifts) * factors).to(dtype)


def rotate(x: Tensor) -> Tensor:
    """Multiply the last dimension of x by an orthogonal matrix of equal absolute values that is its own inverse.

    It spreads a large number over all of its head, so that 4 bits of each are enough; products of two rotated vectors
    are those of the vectors. The matrix is Hadamard's by Sylvester's construction, in blocks of the largest power of
    two that divides the dimension. Rotated caches are from QuaRot (Ashkboos et al. 2024, arXiv 2404.00456).
    """
    half, dim = 1, int(x.shape[-1])
    while dim % (2 * half) == 0:
        first, second = x.reshape(*x.shape[:-1], dim // (2 * half), 2, half).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return x * float(half**-0.5)
