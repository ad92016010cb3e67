"""Rounding, and float8_e4m3fn as bytes: GPUs before sm_89 do not know it."""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: float32 numbers up to 2 ** 22, added to it, lose their fraction


@triton.jit
def round_to_even(x):
    """Round to the nearest integer, halves to the even one; |x| is at most 2 ** 22."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def fp8_bits(x):
    """Convert float32 numbers, of magnitude 448 at most, to the bits of float8_e4m3fn."""
    bits = x.to(tl.uint32, bitcast=True)
    sign, magnitude = bits >> 24 & 0x80, bits & 0x7FFFFFFF
    # Adding just under half of the last bit that stays, or half if that bit is set, rounds halves to even.
    normal = (magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20
    small = round_to_even(tl.abs(x) * 512.0).to(tl.uint32)  # below 2 ** -6 numbers are multiples of 2 ** -9
    return (tl.where(magnitude < 0x3C800000, small, normal - (120 << 3)) | sign).to(tl.uint8)


@triton.jit
def fp8_numbers(tile, dtype: tl.constexpr):
    """Convert bytes of float8_e4m3fn to numbers of `dtype`, 2 ** 8 times too small: in float16 the exponent is 8
    smaller.
    """
    bits = tile.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
