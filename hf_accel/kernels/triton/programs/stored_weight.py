"""The numbers and scales of a quantized weight, as programs read them; see ../quantized_linear.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .integers import floats, nibbles
from .rounded import fp8_numbers


@triton.jit
def zero_points_of(zero_point, group, outputs, output, is_output):
    """Read the zero points of a group of inputs, int8; a byte holds those of two outputs, the even one in its low
    half.
    """
    pairs = (outputs + 1) // 2
    pair = tl.load(zero_point + group * pairs + output // 2, mask=is_output, other=0).to(tl.int32)
    return (pair << (28 - output % 2 * 4) >> 28).to(tl.int8)


@triton.jit
def numbers_that_scale(
    stored, scale, zero_point, minimum, BITS: tl.constexpr, NUMBERS: tl.constexpr, DTYPE: tl.constexpr,
    IS_HIGH: tl.constexpr,
):  # fmt: skip
    """Convert bytes [outputs, bytes] to the numbers that `scale` multiplies, in DTYPE; with minima to the weight.

    With 4 bits those of the low, or the high, halves. scale: of the numbers as they come, with zero points of the
    numbers. FP8 comes 2 ** 8 times too small.
    """
    if NUMBERS == "fp8":
        return fp8_numbers(stored, DTYPE)
    elif BITS == 4 and NUMBERS == "int" and zero_point is None and minimum is None:
        return nibbles(stored, IS_HIGH, DTYPE)
    else:
        integers = stored
        if BITS == 4:
            integers = (stored & 240 if IS_HIGH else stored << 4).to(tl.int8, bitcast=True)
        if NUMBERS == "fp4":  # E2M1 as float16 is 2 ** 14 times too small, and scales are halves
            bits = integers.to(tl.uint8, bitcast=True).to(tl.uint16)
            small = (((bits & 0x80) << 8) | ((bits & 0x70) << 5)).to(tl.float16, bitcast=True)
            return (small.to(tl.float32) * 32768.0).to(DTYPE)
        elif minimum is not None:
            above = 128 if BITS == 4 else 0
            return ((integers.to(tl.float32) + above) * scale[:, None] - minimum[:, None]).to(DTYPE)
        else:
            if zero_point is not None:
                integers = (integers >> 4) - zero_point[:, None]
            if tl.float32 == DTYPE:
                return floats(integers)
            else:
                return integers.to(tl.float32).to(DTYPE)  # which Triton does two at a time


@triton.jit
def scales_of(scale, place, is_there, NUMBERS: tl.constexpr, IS_SHIFTED: tl.constexpr):
    """Read the scales of what `numbers_that_scale` gives. IS_SHIFTED: whether numbers come 16 times too large."""
    factor = tl.load(scale + place, mask=is_there, other=0).to(tl.float32)
    if IS_SHIFTED:
        factor *= 0.0625  # shifting both halves to the right would take longer
    if NUMBERS == "fp8":
        factor *= 256.0
    return factor
