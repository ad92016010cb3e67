"""Rows times a quantized weight that is stored block of inputs by block; see ../quantized_linear.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .order import let_the_next_begin, wait_for_the_one_before
from .pointwise import activation_of
from .stored_weight import numbers_that_scale, scales_of, zero_points_of

VARYING = ["rows"]  # Triton would compile the kernel again where it is 1, or a multiple of 16


@triton.jit
def rows_of_expert(starts, row_tile, ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr):
    """Return (expert, rows, the mask of its rows) of a tile, if each expert has as many tiles as it needs; EXPERTS for
    a tile of none.
    """
    expert = tl.arange(0, EXPERTS_2)
    is_expert = expert < EXPERTS
    start = tl.load(starts + expert, mask=is_expert, other=0)
    end = tl.load(starts + expert + 1, mask=is_expert, other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    before = tl.cumsum(tiles, 0) - tiles
    own = (before <= row_tile) & (row_tile < before + tiles)
    chosen = tl.min(tl.where(own, expert, EXPERTS), 0)
    own_end = tl.sum(tl.where(own, end, 0), 0)
    row = tl.sum(tl.where(own, start + (row_tile - before) * ROWS, 0), 0) + tl.arange(0, ROWS)
    return chosen, row, row < own_end


@triton.jit
def _tile_sums(
    from_x, integers, scale, zero_point, minimum, divisor, bias, is_row, output, outputs, inputs, first, last,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, PER_GROUP: tl.constexpr, IS_HALVED: tl.constexpr,
    IS_CUT: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute the products of rows with the weight's outputs, float32 [OUTPUTS, ROWS], over blocks first to last.

    from_x: where block 0 of the rows is, [BYTES, ROWS]; see `multiply`.
    """
    BYTES: tl.constexpr = BLOCK * BITS // 8
    IS_SHIFTED: tl.constexpr = BITS == 4 and minimum is not None
    byte = tl.arange(0, BYTES)
    is_output = output < outputs
    here = output[:, None] * BYTES + byte[None, :]
    wide = tl.zeros((), tl.int64) + outputs  # offsets may pass 2^31
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for block in range(first, last):
        stored = tl.load(integers + block * BYTES * wide + here, mask=is_output[:, None], other=0)
        factor = scale
        zero = None
        least = None
        if PER_GROUP:
            group = (block * 2 if IS_HALVED else block // PER_GROUP) * wide + output
            factor = scales_of(scale, group, is_output, NUMBERS, IS_SHIFTED)
            if zero_point is not None:
                zero = zero_points_of(zero_point, block // PER_GROUP, wide, output, is_output)
            if minimum is not None:
                least = tl.load(minimum + group, mask=is_output, other=0).to(tl.float32)
        start = block * BLOCK
        is_there = is_row[None, :]
        if IS_CUT:
            is_there = is_there & (start + byte < inputs)[:, None]
        values = tl.load(from_x + start, mask=is_there, other=0)
        added = total if (PER_GROUP == 0 or minimum is not None) else tl.zeros((OUTPUTS, ROWS), tl.float32)
        if BITS == 4:
            low = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, DTYPE, False)
            added = tl.dot(low, values, added, input_precision="ieee")
            if IS_HALVED:
                total += added * factor[:, None]
                factor = tl.load(scale + group + wide, mask=is_output, other=0).to(tl.float32)
                added = tl.zeros((OUTPUTS, ROWS), tl.float32)
            values = tl.load(from_x + start + BYTES, mask=is_there, other=0)
            high = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, DTYPE, True)
            added = tl.dot(high, values, added, input_precision="ieee")
        else:
            whole = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, DTYPE, False)
            added = tl.dot(whole, values, added, input_precision="ieee")
        if PER_GROUP == 0 or minimum is not None:
            total = added
        else:
            total += added * factor[:, None]
    if PER_GROUP == 0:
        factor = tl.load(scale + output, mask=is_output, other=0).to(tl.float32)
        total = total * (factor * 256.0 if NUMBERS == "fp8" else factor)[:, None]
    if divisor is not None:
        total = total / tl.load(divisor)
    if bias is not None:
        total = total + tl.load(bias + output, mask=is_output, other=0).to(tl.float32)[:, None]
    return total


@triton.jit(do_not_specialize=VARYING)
def multiply(
    x, integers, scale, zero_point, minimum, divisor, bias, out, starts, rows, outputs, inputs, blocks, groups, share,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, PER_GROUP: tl.constexpr, IS_HALVED: tl.constexpr,
    IS_CUT: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute one tile; the program is (row tile, output tile, split).

    out: [splits, rows, outputs]. share: blocks of inputs of a split. IS_HALVED: whether each half of a block of 4 bits
    is a group.

    starts: int64 [EXPERTS + 1], the first row of each expert, whose weights lie one after the other; or None.
    EXPERTS_2: EXPERTS up to a power of 2.
    """
    wait_for_the_one_before(OVERLAPS)
    BYTES: tl.constexpr = BLOCK * BITS // 8
    row_tile = tl.program_id(0)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    byte = tl.arange(0, BYTES)
    is_row = row < rows
    is_output = output < outputs
    part = tl.program_id(2)
    first = part * share
    last = tl.minimum(first + share, blocks)
    from_x = x + row.to(tl.int64)[None, :] * inputs + byte[:, None]
    wide = tl.zeros((), tl.int64) + outputs  # offsets may pass 2^31
    if starts is not None:
        expert, row, is_row = rows_of_expert(starts, row_tile, ROWS, EXPERTS, EXPERTS_2)
        last = tl.where(expert < EXPERTS, last, first)  # there may be more tiles than any expert needs
        expert = tl.minimum(expert, EXPERTS - 1)
        from_x = x + row[None, :] * inputs + byte[:, None]
        integers += expert * blocks * wide * BYTES
        scale += expert * groups * wide
        if zero_point is not None:
            zero_point += expert * groups * ((wide + 1) // 2)
        if minimum is not None:
            minimum += expert * groups * wide
        if divisor is not None:
            divisor += expert
        if bias is not None:
            bias += expert * wide
    total = _tile_sums(
        from_x, integers, scale, zero_point, minimum, divisor, bias, is_row, output, outputs, inputs, first, last,
        BITS, NUMBERS, BLOCK, PER_GROUP, IS_HALVED, IS_CUT, OUTPUTS, ROWS, x.dtype.element_ty,
    )  # fmt: skip
    let_the_next_begin(OVERLAPS)
    to = out + (part.to(tl.int64) * rows + row)[None, :] * outputs + output[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


@triton.jit(do_not_specialize=VARYING)
def multiply_by_some(
    x, integers, scale, zero_point, minimum, bias, out, outputs,
    integers_1, scale_1, zero_point_1, minimum_1, bias_1, out_1, outputs_1,
    integers_2, scale_2, zero_point_2, minimum_2, bias_2, out_2, outputs_2, rows, inputs, blocks,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, PER_GROUP: tl.constexpr, IS_HALVED: tl.constexpr,
    IS_CUT: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute `multiply` for two weights of one layout, or three; the tiles of one come after those of another.

    ACTIVATION: -1, or that of a gate: out is activation(first) * second then, both rounded as if they were written.
    """
    wait_for_the_one_before(OVERLAPS)
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    is_row = row < rows
    from_x = x + row.to(tl.int64)[None, :] * inputs + tl.arange(0, BLOCK * BITS // 8)[:, None]
    which = tl.zeros((), tl.int32)
    if ACTIVATION < 0:
        which, tile = weight_of_tile(tile, tl.cdiv(outputs, OUTPUTS), tl.cdiv(outputs_1, OUTPUTS))
        integers, scale = chosen(which, integers, integers_1, integers_2), chosen(which, scale, scale_1, scale_2)
        if zero_point is not None:
            zero_point = chosen(which, zero_point, zero_point_1, zero_point_2)
        if minimum is not None:
            minimum = chosen(which, minimum, minimum_1, minimum_2)
        out, outputs = chosen(which, out, out_1, out_2), chosen(which, outputs, outputs_1, outputs_2)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    total = _tile_sums(
        from_x, integers, scale, zero_point, minimum, None, None, is_row, output, outputs, inputs, 0, blocks,
        BITS, NUMBERS, BLOCK, PER_GROUP, IS_HALVED, IS_CUT, OUTPUTS, ROWS, DTYPE,
    )  # fmt: skip
    if ACTIVATION < 0:
        total = add_biases(total, bias, bias_1, bias_2, output, outputs, which)
    else:
        second = _tile_sums(
            from_x, integers_1, scale_1, zero_point_1, minimum_1, None, bias_1, is_row, output, outputs, inputs,
            0, blocks, BITS, NUMBERS, BLOCK, PER_GROUP, IS_HALVED, IS_CUT, OUTPUTS, ROWS, DTYPE,
        )  # fmt: skip
        total = add_biases(total, bias, None, None, output, outputs, which)
        total = activation_of(total.to(DTYPE).to(tl.float32), ACTIVATION).to(DTYPE).to(tl.float32)
        total *= second.to(DTYPE).to(tl.float32)
    let_the_next_begin(OVERLAPS)
    store_tile(out, total, row, is_row, output, outputs)


@triton.jit
def weight_of_tile(tile, tiles, tiles_1):
    """Return which of up to three weights a tile belongs to, and its number there. tiles: of the first, the second."""
    which = (tile >= tiles).to(tl.int32) + (tile >= tiles + tiles_1).to(tl.int32)
    return which, tile - tl.where(which == 0, 0, tl.where(which == 1, tiles, tiles + tiles_1))


@triton.jit
def chosen(which, first, second, third):
    """Return the argument of the weight `which`. third: None if there are two."""
    one = tl.where(which == 1, second, first)
    if third is not None:
        one = tl.where(which == 2, third, one)
    return one


@triton.jit
def add_biases(sums, bias, bias_1, bias_2, output, outputs, weight):
    """Add to sums [outputs, rows] the bias of their weight. weight: one number, or that of each output."""
    is_output = output < outputs
    weight += tl.zeros_like(output)
    if bias is not None:
        sums += tl.load(bias + output, mask=is_output & (weight == 0), other=0).to(tl.float32)[:, None]
    if bias_1 is not None:
        sums += tl.load(bias_1 + output, mask=is_output & (weight == 1), other=0).to(tl.float32)[:, None]
    if bias_2 is not None:
        sums += tl.load(bias_2 + output, mask=is_output & (weight == 2), other=0).to(tl.float32)[:, None]
    return sums


@triton.jit
def store_tile(out, total, row, is_row, output, outputs):
    to = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[None, :] & (output < outputs)[:, None])


@triton.jit
def add_splits(
    partial, bias, out, numbers, outputs, SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Add partial float32 [SPLITS, numbers], numbers = rows * outputs, to out [numbers]."""
    wait_for_the_one_before(OVERLAPS)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = number < numbers
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(partial + part * numbers + number, mask=is_there, other=0)
    if bias is not None:
        total += tl.load(bias + number % outputs, mask=is_there, other=0).to(tl.float32)
    let_the_next_begin(OVERLAPS)
    tl.store(out + number, total.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def numbers(
    integers, scale, zero_point, minimum, divisor, out, outputs, inputs, blocks,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, PER_GROUP: tl.constexpr, IS_HALVED: tl.constexpr,
    OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Write the weight itself, [outputs, inputs], rounded to out's dtype; the program is (block, output tile)."""
    BYTES: tl.constexpr = BLOCK * BITS // 8
    IS_SHIFTED: tl.constexpr = BITS == 4 and minimum is not None
    block = tl.program_id(0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    byte = tl.arange(0, BYTES)
    is_output = output < outputs
    wide = tl.zeros((), tl.int64) + outputs
    here = (block * wide + output)[:, None] * BYTES + byte[None, :]
    stored = tl.load(integers + here, mask=is_output[:, None], other=0)
    group = output.to(tl.int64)
    zero = None
    least = None
    if PER_GROUP:
        group += (block * 2 if IS_HALVED else block // PER_GROUP) * wide
    factor = scales_of(scale, group, is_output, NUMBERS, IS_SHIFTED)
    if zero_point is not None:
        zero = zero_points_of(zero_point, block // PER_GROUP, wide, output, is_output)
    if minimum is not None:
        least = tl.load(minimum + group, mask=is_output, other=0).to(tl.float32)
    others = factor
    if IS_HALVED:
        others = tl.load(scale + (block * 2 + 1) * wide + output, mask=is_output, other=0).to(tl.float32)
    if divisor is not None:
        by = tl.load(divisor)
        factor = factor / by
        others = others / by
    column = block * BLOCK + byte
    to = out + output[:, None].to(tl.int64) * inputs + column[None, :]
    if BITS == 4:
        low = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, tl.float32, False)
        high = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, tl.float32, True)
        if minimum is None:
            low *= factor[:, None]
            high *= others[:, None]
        tl.store(to, low.to(out.dtype.element_ty), mask=is_output[:, None] & (column < inputs)[None, :])
        is_there = is_output[:, None] & (column + BYTES < inputs)[None, :]
        tl.store(to + BYTES, high.to(out.dtype.element_ty), mask=is_there)
    else:
        whole = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, tl.float32, False)
        if minimum is None:
            whole *= factor[:, None]
        tl.store(to, whole.to(out.dtype.element_ty), mask=is_output[:, None] & (column < inputs)[None, :])
