"""Rows rounded to INT8 or FP8, times a quantized weight of the same kind; see ../quantized_linear.py.

With integers, a number of the result does not depend on the tile: sums within a group of inputs are exact,
and groups are added up in order, by products and sums that are rounded once. Products of FP8 are exact; the GPU
decides how their sums within a group are rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .multiply import VARYING, rows_of_expert
from .rounded import fp8_bits, round_to_even
from .stored_weight import zero_points_of

SMALLEST = tl.constexpr(1e-35)  # a group of smaller numbers counts as zeros


@triton.jit
def round_rows(
    x, levels, factors, inputs, groups,
    FP8: tl.constexpr, GROUP: tl.constexpr, GROUP_2: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Round GROUPS groups of a row; the program is (row, groups).

    levels: [rows, groups * GROUP], int8, or FP8 as bytes. factors: float32 [rows, groups].

    Past the last input there are zeros. The factor of a group that holds NaN or infinity is NaN. GROUP_2: GROUP up to
    a power of 2.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, GROUP_2)
    column = group[:, None] * GROUP + place[None, :]
    is_there = (group < groups)[:, None] & (place < GROUP)[None, :]
    numbers = tl.load(x + row * inputs + column, mask=is_there & (column < inputs), other=0).to(tl.float32)
    is_number = tl.min(tl.where(tl.abs(numbers) < float("inf"), 1, 0), 1) == 1
    largest = tl.max(tl.where(is_number[:, None], tl.abs(numbers), 0.0), 1)
    highest: tl.constexpr = 448.0 if FP8 else 127.0
    inverse = tl.div_rn(highest + tl.zeros_like(largest), tl.maximum(largest, SMALLEST))
    inverse = tl.where(largest >= SMALLEST, inverse, 0.0)
    # Between the product and its rounding, a minimum keeps the compiler from making one operation of them.
    level = tl.minimum(tl.where(is_number[:, None], numbers * inverse[:, None], 0.0), highest)
    to = levels + row * (groups * GROUP) + column
    if FP8:
        tl.store(to, fp8_bits(tl.maximum(level, -highest)), mask=is_there)
    else:
        tl.store(to, round_to_even(level).to(tl.int8), mask=is_there)
    factor = tl.where(is_number, tl.div_rn(largest, highest + tl.zeros_like(largest)), float("nan"))
    tl.store(factors + row * groups + group, factor, mask=group < groups)


@triton.jit(do_not_specialize=VARYING)
def multiply_integers(
    levels, factors, integers, scale, zero_point, bias, out, starts, rows, outputs, blocks, groups,
    BITS: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr, PER_GROUP: tl.constexpr, BY_GROUP: tl.constexpr,
    IS_CUT: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr,
):  # fmt: skip
    """Compute one tile; the program is (row tile, output tile).

    out: [rows, outputs]. PER_GROUP: blocks of inputs of a group of the rows.

    BY_GROUP: whether scales of the weight belong to these groups. IS_CUT: whether the last group has fewer blocks.
    starts, EXPERTS, EXPERTS_2: see `multiply`.
    """
    BYTES: tl.constexpr = BLOCK * BITS // 8
    row_tile = tl.program_id(0)
    row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    byte = tl.arange(0, BYTES)
    is_row = row < rows
    is_output = output < outputs
    wide = tl.zeros((), tl.int64) + outputs  # offsets may pass 2^31
    end = groups
    if starts is not None:
        expert, row, is_row = rows_of_expert(starts, row_tile, ROWS, EXPERTS, EXPERTS_2)
        end = tl.where(expert < EXPERTS, groups, 0)  # there may be more tiles than any expert needs
        expert = tl.minimum(expert, EXPERTS - 1)
        integers += expert * blocks * wide * BYTES
        scale += expert * (groups if BY_GROUP else 1) * wide
        if zero_point is not None:
            zero_point += expert * groups * ((wide + 1) // 2)
        if bias is not None:
            bias += expert * wide
    from_levels = levels + row[None, :] * (groups * PER_GROUP * BLOCK) + byte[:, None]
    here = output[:, None] * BYTES + byte[None, :]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for group in range(0, end):
        factor = tl.load(factors + row * groups + group, mask=is_row, other=0)[None, :]
        if BY_GROUP:
            of_weight = tl.load(scale + group * wide + output, mask=is_output, other=0).to(tl.float32)
            if BITS == 4 and zero_point is None:
                of_weight *= 0.0625  # levels of the weight are 16 times as large
            factor = of_weight[:, None] * factor
        if zero_point is not None:
            zero = zero_points_of(zero_point, group, wide, output, is_output)[:, None]
        added = tl.zeros((OUTPUTS, ROWS), tl.float32 if FP8 else tl.int32)
        for part in tl.static_range(PER_GROUP):
            block = group * PER_GROUP + part
            is_there = is_output[:, None]
            if IS_CUT:
                is_there = is_there & (block + tl.zeros((1, BYTES), tl.int32) < blocks)
            stored = tl.load(integers + block * BYTES * wide + here, mask=is_there, other=0)
            values = tl.load(from_levels + block * BLOCK, mask=is_row[None, :], other=0)
            if BITS == 4:
                low = (stored << 4).to(tl.int8, bitcast=True)
                high = (stored & 240).to(tl.int8, bitcast=True)
                if zero_point is not None:
                    low = (low >> 4) - zero
                    high = (high >> 4) - zero
                added = tl.dot(low, values, added, out_dtype=tl.int32)
                values = tl.load(from_levels + block * BLOCK + BYTES, mask=is_row[None, :], other=0)
                added = tl.dot(high, values, added, out_dtype=tl.int32)
            elif FP8:
                levels_of_weight = stored.to(tl.float8e4nv, bitcast=True)
                added = tl.dot(levels_of_weight, values.to(tl.float8e4nv, bitcast=True), added)
            else:
                added = tl.dot(stored, values, added, out_dtype=tl.int32)
        total = tl.fma(added.to(tl.float32), tl.broadcast_to(factor, (OUTPUTS, ROWS)), total)
    if not BY_GROUP:
        total = total * tl.load(scale + output, mask=is_output, other=0).to(tl.float32)[:, None]
    if bias is not None:
        total = total + tl.load(bias + output, mask=is_output, other=0).to(tl.float32)[:, None]
    to = out + row[None, :] * outputs + output[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])
