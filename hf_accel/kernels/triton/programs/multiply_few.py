"""A few rows times quantized weights, which go from memory into products; see ../few_rows.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .multiply import VARYING, add_biases, chosen, store_tile, weight_of_tile
from .order import let_the_next_begin, wait_for_the_one_before
from .pointwise import activation_of
from .stored_weight import numbers_that_scale, scales_of, zero_points_of

EIGHT = tl.constexpr(8)  # rows: the fewest that a product of 16 outputs takes
TOGETHER = tl.constexpr(4)  # bytes of a thread that the compiler lets lie side by side in an operand of stored bytes


@triton.jit
def _weight_operand(numbers, HALVES: tl.constexpr, PARTS: tl.constexpr, BYTES: tl.constexpr):
    """[halves of 16 outputs, parts, 8 outputs, bytes] -> [parts, outputs, inputs], without moving a number.

    In the operand of a product neighbouring threads hold neighbouring inputs; here each holds a quarter of the bytes,
    which lie side by side in memory. So inputs have another order than there, the same one as in `_rows_operand`.
    """
    apart = tl.reshape(numbers, (HALVES, PARTS, 8, 4, BYTES // 4 // TOGETHER, TOGETHER))
    return tl.reshape(tl.permute(apart, (1, 0, 2, 4, 3, 5)), (PARTS, HALVES * 8, BYTES))


@triton.jit
def _rows_operand(values, EIGHTS: tl.constexpr, PARTS: tl.constexpr, BYTES: tl.constexpr, RUN: tl.constexpr):
    """[runs, eights, parts, 8 rows, 4 threads, inputs of a run] -> [parts, inputs, rows], in the order of
    `_weight_operand`.
    """
    apart = tl.reshape(values, (BYTES // 4 // RUN, EIGHTS, PARTS, EIGHT, 4, RUN // TOGETHER, TOGETHER))
    return tl.reshape(tl.permute(apart, (2, 0, 5, 4, 6, 1, 3)), (PARTS, BYTES, EIGHTS * EIGHT))


@triton.jit(do_not_specialize=VARYING)
def multiply_few(
    x, integers, scale, zero_point, minimum, bias, out, outputs,
    integers_1, scale_1, zero_point_1, minimum_1, bias_1, out_1, outputs_1,
    integers_2, scale_2, zero_point_2, minimum_2, bias_2, out_2, outputs_2, divisor, rows, inputs, blocks,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, PER_GROUP: tl.constexpr, IS_HALVED: tl.constexpr,
    IS_CUT: tl.constexpr, IS_WHOLE: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS outputs of one of up to three weights of a layout; the program is (row tile, tile).

    PARTS blocks of inputs are read at a time, shared by the warps, whose sums are added at the end. A row has the same
    bits whatever other rows there are. IS_HALVED: see `multiply`. IS_CUT: whether the last block has fewer inputs.
    IS_WHOLE: whether PARTS and OUTPUTS divide the blocks and all outputs.

    ACTIVATION: -1, or that of a gate: out is activation(first) * second then, both rounded as if they were written.
    """
    IS_GATED: tl.constexpr = ACTIVATION >= 0
    WIDTH: tl.constexpr = 2 * OUTPUTS if IS_GATED else OUTPUTS  # a program has the outputs of both weights of a gate
    HALVES: tl.constexpr = WIDTH // 8  # halves of 16 outputs
    EIGHTS: tl.constexpr = ROWS // EIGHT
    BYTES: tl.constexpr = BLOCK * BITS // 8
    EACH: tl.constexpr = BYTES // 4  # bytes of a thread
    RUN: tl.constexpr = 8 if EACH > 8 else EACH  # inputs of a row that a thread reads at a time
    IS_SHIFTED: tl.constexpr = BITS == 4 and minimum is not None
    IN_NUMBERS: tl.constexpr = minimum is not None  # whether the scale is in the numbers that are multiplied
    DTYPE: tl.constexpr = x.dtype.element_ty
    row_tile, tile = tl.program_id(0), tl.program_id(1)
    which = tl.zeros((), tl.int32)
    if not IS_GATED and integers_1 is not None:
        which, tile = weight_of_tile(tile, tl.cdiv(outputs, OUTPUTS), tl.cdiv(outputs_1, OUTPUTS))
        integers, scale = chosen(which, integers, integers_1, integers_2), chosen(which, scale, scale_1, scale_2)
        if zero_point is not None:
            zero_point = chosen(which, zero_point, zero_point_1, zero_point_2)
        if minimum is not None:
            minimum = chosen(which, minimum, minimum_1, minimum_2)
        out, outputs = chosen(which, out, out_1, out_2), chosen(which, outputs, outputs_1, outputs_2)
    wide = tl.zeros((), tl.int64) + outputs  # offsets may pass 2^31

    line = tl.arange(0, HALVES * PARTS * 8)  # half, part, output of eight: each has the bytes of a block
    line_part, half = line // 8 % PARTS, line // (8 * PARTS)
    line_output = tile * OUTPUTS + half % (OUTPUTS // 8) * 8 + line % 8
    is_second = half >= OUTPUTS // 8
    from_weight = _of_line(integers, integers_1, is_second, IS_GATED)
    if IS_GATED:  # a choice hides from the compiler that both begin at a multiple of 16 bytes
        from_weight = tl.multiple_of(from_weight, 16)
    byte = tl.max_contiguous(tl.arange(0, BYTES), EACH)  # so many are read at a time, as an operand has them
    here = (from_weight + (line_part * wide + line_output) * BYTES)[:, None] + byte[None, :]

    place = tl.arange(0, EACH // RUN * EIGHTS * PARTS * EIGHT * 4)  # run, eight rows, part, row, thread
    place_part = place // (4 * EIGHT) % PARTS
    row = row_tile * ROWS + place // (4 * EIGHT * PARTS) % EIGHTS * EIGHT + place // 4 % EIGHT
    start = place_part * BLOCK + place % 4 * EACH + place // (4 * EIGHT * PARTS * EIGHTS) * RUN
    column_of_x = start[:, None] + tl.arange(0, RUN)[None, :]
    there = (x + row.to(tl.int64) * inputs)[:, None] + column_of_x

    part = tl.arange(0, PARTS)
    column = tl.arange(0, WIDTH)
    output = tile * OUTPUTS + column % OUTPUTS
    of_second = column >= OUTPUTS
    total = tl.zeros((PARTS, WIDTH, ROWS), tl.float32)
    wait_for_the_one_before(OVERLAPS)
    for first in range(0, blocks, PARTS):
        is_line = (first + line_part < blocks) & (line_output < outputs)
        is_place = row < rows
        if IS_WHOLE:
            stored = tl.load(here)
        else:
            stored = tl.load(here, mask=is_line[:, None], other=0)
            is_place = is_place & (first + place_part < blocks)
        is_there = is_place[:, None]
        if IS_CUT:
            is_there = is_there & (first * BLOCK + column_of_x < inputs)
        values = tl.load(there, mask=is_there, other=0)
        factor = scale
        zero = None
        least = None
        if minimum is not None:
            group = (first + line_part) // PER_GROUP * wide + line_output
            factor = scales_of(_of_line(scale, scale_1, is_second, IS_GATED), group, is_line, NUMBERS, IS_SHIFTED)
            from_minimum = _of_line(minimum, minimum_1, is_second, IS_GATED)
            least = tl.load(from_minimum + group, mask=is_line, other=0).to(tl.float32)
        if zero_point is not None:
            from_zeros = _of_line(zero_point, zero_point_1, is_second, IS_GATED)
            zero = zero_points_of(from_zeros, (first + line_part) // PER_GROUP, wide, line_output, is_line)
        added = total if (PER_GROUP == 0 or IN_NUMBERS) else tl.zeros((PARTS, WIDTH, ROWS), tl.float32)
        if BITS == 4:
            low = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, DTYPE, False)
            operand = _rows_operand(values, EIGHTS, PARTS, BYTES, RUN)
            added = tl.dot(_weight_operand(low, HALVES, PARTS, BYTES), operand, added)
            if IS_HALVED:
                place_of_scale = ((first + part) * 2)[:, None] * wide + output[None, :]
                is_scale = ((first + part) < blocks)[:, None] & (output < outputs)[None, :]
                from_scale = _of_line(scale, scale_1, of_second[None, :], IS_GATED)
                total += added * scales_of(from_scale, place_of_scale, is_scale, NUMBERS, IS_SHIFTED)[:, :, None]
                added = tl.zeros((PARTS, WIDTH, ROWS), tl.float32)
            is_there = is_place[:, None]
            if IS_CUT:
                is_there = is_there & (first * BLOCK + BYTES + column_of_x < inputs)
            values = tl.load(there + BYTES, mask=is_there, other=0)
            high = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, DTYPE, True)
            operand = _rows_operand(values, EIGHTS, PARTS, BYTES, RUN)
            added = tl.dot(_weight_operand(high, HALVES, PARTS, BYTES), operand, added)
        else:
            whole = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, DTYPE, False)
            operand = _rows_operand(values, EIGHTS, PARTS, BYTES, RUN)
            added = tl.dot(_weight_operand(whole, HALVES, PARTS, BYTES), operand, added)
        if PER_GROUP == 0 or IN_NUMBERS:
            total = added
        else:
            group_of_part = (first + part) * 2 + 1 if IS_HALVED else (first + part) // PER_GROUP
            place_of_scale = group_of_part[:, None] * wide + output[None, :]
            is_scale = ((first + part) < blocks)[:, None] & (output < outputs)[None, :]
            from_scale = _of_line(scale, scale_1, of_second[None, :], IS_GATED)
            total += added * scales_of(from_scale, place_of_scale, is_scale, NUMBERS, IS_SHIFTED)[:, :, None]
        here += PARTS * wide * BYTES
        there += PARTS * BLOCK
    let_the_next_begin(OVERLAPS)
    sums = tl.sum(total, 0)
    if PER_GROUP == 0:
        from_scale = _of_line(scale, scale_1, of_second, IS_GATED)
        sums *= scales_of(from_scale, output, output < outputs, NUMBERS, IS_SHIFTED)[:, None]
    if divisor is not None:
        sums = sums / tl.load(divisor)
    weight = of_second.to(tl.int32) if IS_GATED else which
    sums = add_biases(sums, bias, bias_1, bias_2, output, outputs, weight)
    if IS_GATED:
        apart = tl.permute(tl.reshape(sums.to(DTYPE).to(tl.float32), (2, OUTPUTS, ROWS)), (1, 2, 0))
        gate, up = tl.split(apart)
        sums = activation_of(gate, ACTIVATION).to(DTYPE).to(tl.float32) * up
    out_row = row_tile * ROWS + tl.arange(0, ROWS)
    store_tile(out, sums, out_row, out_row < rows, tile * OUTPUTS + tl.arange(0, OUTPUTS), outputs)


@triton.jit
def _of_line(first, second, is_second, IS_GATED: tl.constexpr):
    if IS_GATED:
        return tl.where(is_second, second, first)
    else:
        return first
