"""Writing K and V into pages, quantized on the way: the bits of cache/quantized.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .rounded import fp8_bits, round_to_even

PLAIN, INT8, FP8, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _maximum(x, mask):
    """Of the magnitudes of x; NaN if one of them is NaN."""
    largest = tl.max(tl.where(mask, tl.abs(x), 0.0), 0)
    return tl.where(tl.max(tl.where(mask & (x != x), 1, 0), 0) > 0, float("nan"), largest)


@triton.jit
def _scaled(x, scale, largest: tl.constexpr):
    """Levels: x over its scale, within +-largest; 0 where that is not a number."""
    levels = tl.div_rn(x, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(x))
    levels = tl.where(levels == levels, levels, 0.0)
    return tl.minimum(tl.maximum(levels, -largest), largest)


@triton.jit
def _write_head(
    states, pages, scales, target, scale_target, DIM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    """One head of one token."""
    dims = tl.arange(0, BLOCK)
    if KIND == INT4:
        mask = dims < DIM // 2
        even = tl.load(states + 2 * dims, mask=mask, other=0.0).to(tl.float32)
        odd = tl.load(states + 2 * dims + 1, mask=mask, other=0.0).to(tl.float32)
        is_nan = tl.max(tl.where(mask & ((even != even) | (odd != odd)), 1, 0), 0) > 0
        high = tl.max(tl.where(mask, tl.maximum(even, odd), -float("inf")), 0)
        low = tl.min(tl.where(mask, tl.minimum(even, odd), float("inf")), 0)
        high, low = tl.where(is_nan, float("nan"), high), tl.where(is_nan, float("nan"), low)
        stored = scales.dtype.element_ty
        middle = (low + high) * 0.5
        scale = tl.div_rn(high - low, 15.0).to(stored).to(tl.float32)
        equal = scale == 0
        scale = tl.where(equal, middle.to(stored).to(tl.float32), scale)
        added = tl.where(equal, 0.5, tl.div_rn(middle, scale)).to(stored).to(tl.float32)
        added = tl.where((added == added) & (tl.abs(added) != float("inf")), added, 0.0)
        divisor = tl.where(scale == 0, 1.0, scale)
        first = tl.div_rn(even, divisor + tl.zeros_like(even)) - added + 7.5
        second = tl.div_rn(odd, divisor + tl.zeros_like(odd)) - added + 7.5
        tl.store(pages + target + dims, _nibble(first) | (_nibble(second) << 4), mask=mask)
        tl.store(scales + 2 * scale_target, scale.to(stored))
        tl.store(scales + 2 * scale_target + 1, added.to(stored))
    else:
        mask = dims < DIM
        numbers = tl.load(states + dims, mask=mask, other=0.0)
        if KIND == PLAIN:
            tl.store(pages + target + dims, numbers, mask=mask)
        else:
            stored = scales.dtype.element_ty
            largest: tl.constexpr = 127.0 if KIND == INT8 else 448.0
            numbers = numbers.to(tl.float32)
            scale = tl.div_rn(_maximum(numbers, mask), largest).to(stored)
            levels = _scaled(numbers, scale.to(tl.float32), largest)
            if KIND == INT8:
                tl.store(pages + target + dims, round_to_even(levels).to(tl.int8), mask=mask)
            else:
                tl.store(pages + target + dims, fp8_bits(levels), mask=mask)
            tl.store(scales + scale_target, scale)


@triton.jit
def _nibble(levels):
    """Levels 0..15, rounded; 0 for what is not a number."""
    levels = tl.where(levels == levels, levels, 0.0)
    return round_to_even(tl.minimum(tl.maximum(levels, 0.0), 15.0)).to(tl.uint8)


@triton.jit
def write(
    keys, values, k_pages, v_pages, k_scales, v_scales, slots,
    k_token, k_head, v_token, v_head, num_heads, block_size,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """K and V of one head of one token. A slot below 0 is none: nothing is written."""
    token, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    place = (slot // block_size * num_heads + head) * block_size + slot % block_size
    columns: tl.constexpr = 2 if KIND == INT4 else 1
    _write_head(
        keys + token * k_token + head * k_head, k_pages, k_scales, place * (KEY_DIM // columns), place,
        KEY_DIM, BLOCK_K, KIND,
    )  # fmt: skip
    _write_head(
        values + token * v_token + head * v_head, v_pages, v_scales, place * (VALUE_DIM // columns), place,
        VALUE_DIM, BLOCK_V, KIND,
    )  # fmt: skip
