"""Writing K and V into pages, quantized on the way: the bits of cache/quantized.py. K may be rotated before."""

from __future__ import annotations

import triton
import triton.language as tl

from .order import wait_for_the_one_before
from .pointwise import rotate_heads, rotated
from .rounded import fp8_bits, round_to_even

PLAIN, INT8, FP8, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _maximum(x, mask):
    """Return the largest magnitude of x; NaN if a number is NaN."""
    largest = tl.max(tl.where(mask, tl.abs(x), 0.0), 0)
    return tl.where(tl.max(tl.where(mask & (x != x), 1, 0), 0) > 0, float("nan"), largest)


@triton.jit
def _scaled(x, scale, largest: tl.constexpr):
    """Return the levels: x over its scale, within +-largest; 0 where that is not a number."""
    levels = tl.div_rn(x, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(x))
    levels = tl.where(levels == levels, levels, 0.0)
    return tl.minimum(tl.maximum(levels, -largest), largest)


@triton.jit
def _hadamard(x, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Multiply x [BLOCK] float32, in blocks of 2 ** STAGES, as `rotate` of cache/quantized.py does, sum by sum."""
    place = tl.arange(0, BLOCK)
    for stage in tl.static_range(STAGES):
        other = tl.gather(x, place ^ (1 << stage), 0)
        x = tl.where((place >> stage) & 1 == 0, x + other, other - x)
    return x * (2.0 ** (-0.5 * STAGES))


@triton.jit
def _store_range(x, pages, scales, target, scale_target, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Store x [BLOCK] float32, of which DIM numbers count, by its range: two levels in a byte, a scale, a shift."""
    place = tl.arange(0, BLOCK)
    mask = place < DIM
    is_number = mask & (x == x)
    is_nan = tl.max(tl.where(mask & (x != x), 1, 0), 0) > 0
    high = tl.where(is_nan, float("nan"), tl.max(tl.where(is_number, x, -float("inf")), 0))
    low = tl.where(is_nan, float("nan"), tl.min(tl.where(is_number, x, float("inf")), 0))
    stored = scales.dtype.element_ty
    middle = (low + high) * 0.5
    scale = tl.div_rn(high - low, 15.0).to(stored).to(tl.float32)
    equal = scale == 0
    scale = tl.where(equal, middle.to(stored).to(tl.float32), scale)
    added = tl.where(equal, 0.5, tl.div_rn(middle, scale)).to(stored).to(tl.float32)
    added = tl.where((added == added) & (tl.abs(added) != float("inf")), added, 0.0)
    levels = tl.div_rn(x, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(x)) - added + 7.5
    levels = tl.where(levels == levels, levels, 0.0)
    levels = round_to_even(tl.minimum(tl.maximum(levels, 0.0), 15.0)).to(tl.uint8)
    first, second = tl.split(tl.reshape(levels, (BLOCK // 2, 2)))
    byte = tl.arange(0, BLOCK // 2)
    tl.store(pages + target + byte, first | (second << 4), mask=byte < DIM // 2)
    tl.store(scales + 2 * scale_target, scale.to(stored))
    tl.store(scales + 2 * scale_target + 1, added.to(stored))


@triton.jit
def _store_head(
    numbers, pages, scales, place, DIM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, STAGES: tl.constexpr
):
    """Store one head of one token, [BLOCK], of which the first DIM count, at a place among all heads of pages."""
    dims = tl.arange(0, BLOCK)
    mask = dims < DIM
    if KIND == PLAIN:
        tl.store(pages + place * DIM + dims, numbers, mask=mask)
    elif KIND == INT4:
        rotated_numbers = _hadamard(numbers.to(tl.float32), BLOCK, STAGES)
        _store_range(rotated_numbers, pages, scales, place * (DIM // 2), place, DIM, BLOCK)
    else:
        stored = scales.dtype.element_ty
        largest: tl.constexpr = 127.0 if KIND == INT8 else 448.0
        numbers = numbers.to(tl.float32)
        scale = tl.div_rn(_maximum(numbers, mask), largest).to(stored)
        levels = _scaled(numbers, scale.to(tl.float32), largest)
        if KIND == INT8:
            tl.store(pages + place * DIM + dims, round_to_even(levels).to(tl.int8), mask=mask)
        else:
            tl.store(pages + place * DIM + dims, fp8_bits(levels), mask=mask)
        tl.store(scales + place, scale)


@triton.jit
def _head(states, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load the numbers of one head of one token, [BLOCK]."""
    dims = tl.arange(0, BLOCK)
    return tl.load(states + dims, mask=dims < DIM, other=0.0)


@triton.jit
def rotate_head(
    x, out, x_token, x_head, num_heads, DIM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Rotate one head of one token, as K and V are rotated for INT4 pages. out: contiguous, [tokens, heads, DIM]."""
    wait_for_the_one_before(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    numbers = _head(x + row // num_heads * x_token + row % num_heads * x_head, DIM, BLOCK)
    rotated_numbers = _hadamard(numbers.to(tl.float32), BLOCK, STAGES)
    dims = tl.arange(0, BLOCK)
    tl.store(out + row * DIM + dims, rotated_numbers.to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit
def write(
    keys, values, k_pages, v_pages, k_scales, v_scales, slots,
    k_token, k_head, v_token, v_head, num_heads, block_size,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, KIND: tl.constexpr,
    STAGES_K: tl.constexpr, STAGES_V: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write K and V of one head of one token. A slot below 0 is none: nothing is written."""
    wait_for_the_one_before(OVERLAPS)
    token, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    place = (slot // block_size * num_heads + head) * block_size + slot % block_size
    key = _head(keys + token * k_token + head * k_head, KEY_DIM, BLOCK_K)
    _store_head(key, k_pages, k_scales, place, KEY_DIM, BLOCK_K, KIND, STAGES_K)
    value = _head(values + token * v_token + head * v_head, VALUE_DIM, BLOCK_V)
    _store_head(value, v_pages, v_scales, place, VALUE_DIM, BLOCK_V, KIND, STAGES_V)


@triton.jit
def _rotated_head(
    x, cos, sin, DIM: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, ROUND_EACH: tl.constexpr
):
    """Load the numbers of one head of one token, [BLOCK], and rotate them; they keep the order of the pages."""
    place = tl.arange(0, BLOCK)
    mask = place < DIM
    is_first = place % 2 == 0 if INTERLEAVED else place < DIM // 2
    other = place ^ 1 if INTERLEAVED else tl.where(is_first, place + DIM // 2, place - DIM // 2)
    own = tl.load(x + place, mask=mask, other=0).to(tl.float32)
    partner = tl.gather(own, other, 0)
    partner = tl.where(is_first, -partner, partner)
    cos = tl.load(cos + place, mask=mask, other=0).to(tl.float32)
    sin = tl.load(sin + place, mask=mask, other=0).to(tl.float32)
    return rotated(own, partner, cos, sin, x.dtype.element_ty, ROUND_EACH)


@triton.jit
def rotate_and_write(
    q, k, v, q_out, k_out, cos, sin, k_pages, v_pages, k_scales, v_scales, slots,
    tokens, q_heads, num_heads, block_size, q_batch, q_head, q_token, k_batch, k_head, k_token,
    v_batch, v_head, v_token, table_batch, table_token,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, KIND: tl.constexpr,
    STAGES_K: tl.constexpr, STAGES_V: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROUND_EACH: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of q of one token; after the heads of q, rotate and write one head of K, and write one of V.

    q, k, v: [batch, heads, tokens, dim]; q_out, k_out: [batch, tokens, heads, dim], contiguous. A slot < 0 is none.
    """
    wait_for_the_one_before(OVERLAPS)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, token = row // tokens, row % tokens
    cos += batch * table_batch + token * table_token
    sin += batch * table_batch + token * table_token
    of_q = (q_heads + HEADS - 1) // HEADS
    if block < of_q:
        some = tl.arange(0, HEADS).to(tl.int64)[:, None] + block * HEADS
        q += batch * q_batch + token * q_token
        q_out += row * q_heads * KEY_DIM
        rotate_heads(q, q_out, some, q_heads, KEY_DIM, cos, sin, q_head, KEY_DIM, INTERLEAVED, ROUND_EACH, PAIRS)
    else:
        head = block - of_q
        k += batch * k_batch + token * k_token + head * k_head
        key = _rotated_head(k, cos, sin, KEY_DIM, BLOCK_K, INTERLEAVED, ROUND_EACH)
        dims = tl.arange(0, BLOCK_K)
        tl.store(k_out + (row * num_heads + head) * KEY_DIM + dims, key, mask=dims < KEY_DIM)
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            place = (slot // block_size * num_heads + head) * block_size + slot % block_size
            _store_head(key, k_pages, k_scales, place, KEY_DIM, BLOCK_K, KIND, STAGES_K)
            value = _head(v + batch * v_batch + token * v_token + head * v_head, VALUE_DIM, BLOCK_V)
            _store_head(value, v_pages, v_scales, place, VALUE_DIM, BLOCK_V, KIND, STAGES_V)
