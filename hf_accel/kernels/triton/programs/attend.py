"""Attention over pages or packed keys: one kernel for decode, verification and prefill, K and V read in place.

The softmax is computed block by block, as in FlashAttention (Dao et al. 2022, arXiv 2205.14135). The queries of the
heads that share a key head are rows of one product. The keys of a sequence with few queries are shared among
programs, SPLIT_KEYS each, and a second kernel merges the parts (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .order import let_the_next_begin, wait_for_the_one_before
from .rounded import fp8_numbers

# These change from pass to pass. Triton would compile the kernel again where one is 1, or a multiple of 16.
VARYING = [
    "table_row", "num_row_blocks", "num_splits", "first_query", "rows_of_part", "least_queries", "most_queries",
]  # fmt: skip
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
PLAIN, SCALED, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of pages
INT4_MIDDLE = tl.constexpr(7.5)


@triton.jit
def _levels(tile, FP8: tl.constexpr, dtype: tl.constexpr):
    """Convert stored int8 or fp8 to numbers of `dtype`, exactly; fp8 comes out 2 ** 8 times too small, see
    fp8_numbers.
    """
    if FP8:
        return fp8_numbers(tile, dtype)
    return tile.to(tl.float32).to(dtype)  # straight from int8, the interpreter's bfloat16 would be wrong


@triton.jit
def _scores(x, softcap, scale, CAPPED: tl.constexpr):
    """Turn products q k into scores times log2(e)."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is 1 long before exp2 overflows
        power = tl.minimum(x * (scale / softcap) * (2 * LOG2_E), 64.0)
        return softcap * (1 - 2 / (tl.exp2(power) + 1)) * LOG2_E
    return x * (scale * LOG2_E)


@triton.jit
def _finish(numbers, lse, sink):
    """Add a sink [rows] (base 2) to normalized numbers [rows, D] of lse [rows] (base 2) -> the results, their lse."""
    largest = tl.maximum(lse, sink)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    weight = tl.exp2(lse - largest)
    total = weight + tl.exp2(sink - largest)
    divisor = tl.where(total == 0, 1.0, total)
    return numbers * (weight / divisor)[:, None], tl.where(total == 0, -float("inf"), largest + tl.log2(divisor))


@triton.jit
def _first_part(position, window, SPLIT_KEYS: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the part that holds the first key of a query at this position: parts before it are not kept."""
    if WINDOWED:
        return tl.maximum(0, position - window + 1) // SPLIT_KEYS
    return position * 0


@triton.jit(do_not_specialize=VARYING)
def attend(
    q, k, v, k_scales, v_scales, out, lse, parts, part_lse, sinks, block_table, cu_q, kv_len, cu_k,
    q_token, q_head, k_block, k_head, k_token, v_block, v_head, v_token, table_row,
    num_heads, num_row_blocks, num_splits, first_query, rows_of_part, least_queries, most_queries,
    scale, softcap, window,
    GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, IS_SPLIT: tl.constexpr, KIND: tl.constexpr, FP8: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute one block of rows of one sequence and key head; axis 1 of the grid goes over the parts of its keys."""
    wait_for_the_one_before(OVERLAPS)
    row_block, place = tl.program_id(0) % num_row_blocks, tl.program_id(0) // num_row_blocks
    kv_heads = num_heads // GROUP
    sequence, kv_head = place // kv_heads, place % kv_heads
    start = tl.load(cu_q + sequence)
    count = tl.load(cu_q + sequence + 1) - start
    if count < least_queries or count > most_queries:
        return
    num_rows = (tl.minimum(count, first_query + rows_of_part) - first_query) * GROUP
    if row_block * BLOCK_M >= num_rows:
        return
    keys = tl.load(kv_len + sequence)
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = first_query + row // GROUP, kv_head * GROUP + row % GROUP
    is_row = row < num_rows
    # The positions of this block's first and last queries bound the keys that it sees.
    shift = keys - count
    position = shift + query
    begin, end = 0, keys
    if CAUSAL:
        last = first_query + (tl.minimum(row_block * BLOCK_M + BLOCK_M, num_rows) - 1) // GROUP
        end = tl.minimum(keys, shift + last + 1)
    if WINDOWED:
        begin = tl.maximum(0, shift + first_query + row_block * BLOCK_M // GROUP - window + 1)
    if IS_SPLIT:
        part = tl.program_id(1) + _first_part(shift + first_query, window, SPLIT_KEYS, WINDOWED)
        end = tl.minimum(end, (part + 1) * SPLIT_KEYS)
        begin = tl.maximum(begin, part * SPLIT_KEYS)
        if begin >= end:
            return

    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    per_column: tl.constexpr = 2 if KIND == INT4 else 1  # numbers in an element of a page
    key_columns: tl.constexpr = HEAD_DIM // per_column
    value_columns: tl.constexpr = VALUE_DIM // per_column
    q_rows = q + (start + query).to(tl.int64)[:, None] * q_token + head[:, None] * q_head
    dtype = q.dtype.element_ty
    product: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    if KIND == INT4:
        # Pages hold two numbers in a byte: the even columns of q meet the low halves, the odd ones the high halves.
        known = is_row[:, None] & (dims < key_columns)[None, :]
        even = tl.load(q_rows + 2 * dims[None, :], mask=known, other=0.0)
        odd = tl.load(q_rows + 2 * dims[None, :] + 1, mask=known, other=0.0)
        q_sum = tl.sum(even.to(tl.float32), 1) + tl.sum(odd.to(tl.float32), 1)
        high = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    else:
        even = tl.load(q_rows + dims[None, :], mask=is_row[:, None] & (dims < key_columns)[None, :], other=0.0)
    low = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if PAGE == 0:
        first_key = tl.load(cu_k + sequence).to(tl.int64)

    # Blocks begin at multiples of BLOCK_N, so that a key's block does not depend on who else is in this program.
    for block_start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        key = block_start + tl.arange(0, BLOCK_N)
        is_key = (key >= begin) & (key < end)
        if PAGE == 0:
            k_offset = (first_key + key) * k_token + kv_head * k_head
            v_offset = (first_key + key) * v_token + kv_head * v_head
        else:
            page = tl.load(block_table + sequence.to(tl.int64) * table_row + key // PAGE, mask=is_key, other=0)
            page, slot = page.to(tl.int64), key % PAGE
            k_offset = page * k_block + kv_head * k_head + slot * k_token
            v_offset = page * v_block + kv_head * v_head + slot * v_token
            scale_offset = (page * kv_heads + kv_head) * PAGE + slot
        k_tile = tl.load(
            k + k_offset[None, :] + dims[:, None], mask=is_key[None, :] & (dims < key_columns)[:, None], other=0
        )
        if KIND == INT4:
            scores = tl.dot(even, ((k_tile & 15).to(tl.float32) - INT4_MIDDLE).to(dtype), input_precision=product)
            scores += tl.dot(odd, ((k_tile >> 4).to(tl.float32) - INT4_MIDDLE).to(dtype), input_precision=product)
            factor = tl.load(k_scales + 2 * scale_offset, mask=is_key, other=0).to(tl.float32)
            added = tl.load(k_scales + 2 * scale_offset + 1, mask=is_key, other=0).to(tl.float32)
            scores = (scores + q_sum[:, None] * added[None, :]) * factor[None, :]
        elif KIND == SCALED:
            scores = tl.dot(even, _levels(k_tile, FP8, dtype), input_precision=product)
            factor = tl.load(k_scales + scale_offset, mask=is_key, other=0).to(tl.float32)
            scores *= (factor * 256.0 if FP8 else factor)[None, :]
        else:
            scores = tl.dot(even, k_tile, input_precision=product)
        scores = _scores(scores, softcap, scale, CAPPED)
        seen = is_key[None, :] & is_row[:, None]
        if CAUSAL:
            seen &= key[None, :] <= position[:, None]
        if WINDOWED:
            seen &= key[None, :] > position[:, None] - window
        scores = tl.where(seen, scores, -float("inf"))

        larger = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet stays at zero: -inf - -inf would be NaN.
        safe = tl.where(larger == -float("inf"), 0.0, larger)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(largest - safe)
        total = total * shrink + tl.sum(weights, 1)
        largest = larger
        v_tile = tl.load(
            v + v_offset[:, None] + value_dims[None, :],
            mask=is_key[:, None] & (value_dims < value_columns)[None, :],
            other=0,
        )
        low *= shrink[:, None]
        if KIND == INT4:
            factor = tl.load(v_scales + 2 * scale_offset, mask=is_key, other=0).to(tl.float32)[:, None]
            added = tl.load(v_scales + 2 * scale_offset + 1, mask=is_key, other=0).to(tl.float32)[:, None]
            low_values = (((v_tile & 15).to(tl.float32) - INT4_MIDDLE + added) * factor).to(dtype)
            high_values = (((v_tile >> 4).to(tl.float32) - INT4_MIDDLE + added) * factor).to(dtype)
            low += tl.dot(weights.to(dtype), low_values, input_precision=product)
            high = high * shrink[:, None] + tl.dot(weights.to(dtype), high_values, input_precision=product)
        elif KIND == SCALED:
            factor = tl.load(v_scales + scale_offset, mask=is_key, other=0).to(tl.float32)[:, None]
            values = _levels(v_tile, FP8, tl.float32) * (factor * 256.0 if FP8 else factor)
            low += tl.dot(weights.to(dtype), values.to(dtype), input_precision=product)
        else:
            low += tl.dot(weights.to(dtype), v_tile, input_precision=product)

    let_the_next_begin(OVERLAPS)
    # Normalized, with the log (base 2) of what they were divided by: so are parts merged, and a whole is one part.
    divisor = tl.where(total == 0, 1.0, total)
    row_lse = tl.where(total == 0, -float("inf"), largest + tl.log2(divisor))
    low = low / divisor[:, None]
    if KIND == INT4:
        high = high / divisor[:, None]
    is_number = is_row[:, None] & (value_dims < value_columns)[None, :]
    if IS_SPLIT:
        part_row = ((sequence * rows_of_part + query - first_query) * num_heads + head).to(tl.int64)
        part_row = part_row * num_splits + tl.program_id(1)
        target = parts + part_row[:, None] * VALUE_DIM + per_column * value_dims[None, :]
        tl.store(target, low, mask=is_number)
        if KIND == INT4:
            tl.store(target + 1, high, mask=is_number)
        tl.store(part_lse + part_row, row_lse, mask=is_row)
    else:
        sink = tl.full([BLOCK_M], -float("inf"), tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_row, other=0).to(tl.float32) * LOG2_E
        result_row = (start + query).to(tl.int64) * num_heads + head
        target = out + result_row[:, None] * VALUE_DIM + per_column * value_dims[None, :]
        numbers, whole_lse = _finish(low, row_lse, sink)
        tl.store(target, numbers.to(dtype), mask=is_number)
        if KIND == INT4:
            numbers, whole_lse = _finish(high, row_lse, sink)
            tl.store(target + 1, numbers.to(dtype), mask=is_number)
        if lse is not None:
            tl.store(lse + result_row, whole_lse * LN_2, mask=is_row)


@triton.jit(do_not_specialize=VARYING)
def merge(
    parts, part_lse, out, lse, sinks, cu_q, kv_len,
    num_heads, num_splits, first_query, rows_of_part, most_queries, window,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, SPLIT_KEYS: tl.constexpr, WINDOWED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the parts of one query and head in the order of their keys."""
    wait_for_the_one_before(OVERLAPS)
    head, place = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads
    sequence, row = place // rows_of_part, place % rows_of_part
    query = first_query + row
    start = tl.load(cu_q + sequence)
    count = tl.load(cu_q + sequence + 1) - start
    if query >= count or count > most_queries:
        return
    position = tl.load(kv_len + sequence) - count + query
    first, last = 0, (position + SPLIT_KEYS) // SPLIT_KEYS  # parts; none if the position is below 0
    if position < 0:
        last = 0
    if WINDOWED:
        first = tl.maximum(0, position - window + 1) // SPLIT_KEYS
    part = (place.to(tl.int64) * num_heads + head) * num_splits
    part -= _first_part(position - row, window, SPLIT_KEYS, WINDOWED)
    largest = tl.full([1], -float("inf"), tl.float32)
    for split in range(first, last):
        largest = tl.maximum(largest, tl.load(part_lse + part + split))
    safe = tl.where(largest == -float("inf"), 0.0, largest)
    dims = tl.arange(0, BLOCK_V)
    numbers = tl.zeros([1, BLOCK_V], tl.float32)
    total = tl.zeros([1], tl.float32)
    for split in range(first, last):
        weight = tl.exp2(tl.load(part_lse + part + split) - safe)
        total += weight
        more = tl.load(parts + (part + split) * VALUE_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
        numbers += weight[:, None] * more[None, :]
    let_the_next_begin(OVERLAPS)
    divisor = tl.where(total == 0, 1.0, total)
    row_lse = tl.where(total == 0, -float("inf"), safe + tl.log2(divisor))
    sink = tl.full([1], -float("inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32) * LOG2_E
    numbers, whole_lse = _finish(numbers / divisor[:, None], row_lse, sink)
    result = (start + query).to(tl.int64) * num_heads + head
    target = out + result * VALUE_DIM + dims[None, :]
    tl.store(target, numbers.to(out.dtype.element_ty), mask=(dims < VALUE_DIM)[None, :])
    if lse is not None:
        tl.store(lse + result + tl.arange(0, 1), whole_lse * LN_2)
