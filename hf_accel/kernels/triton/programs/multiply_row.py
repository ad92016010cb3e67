"""One row times quantized weights, without products of tiles; see ../quantized_linear.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .order import let_the_next_begin, wait_for_the_one_before
from .pointwise import activation_of
from .stored_weight import numbers_that_scale, scales_of, zero_points_of


@triton.jit
def _row_sums(
    x, integers, scale, zero_point, minimum, divisor, bias, outputs, inputs, blocks, tile,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, PER_GROUP: tl.constexpr, IS_HALVED: tl.constexpr,
    IS_CUT: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS outputs of the row x, float32.

    Memory is the limit: what counts is how much is asked of it at once. BLOCKS blocks of inputs are read at a time, in
    pieces of 16 bytes, the next ones while these are multiplied, and the threads of a program wait for each other at
    its end alone. The first blocks of the weight are asked for before the launch waits for the one that writes x.
    """
    BYTES: tl.constexpr = BLOCK * BITS // 8
    IS_SHIFTED: tl.constexpr = BITS == 4 and minimum is not None
    PARTS: tl.constexpr = BYTES // 16
    lane = tl.arange(0, BLOCKS * OUTPUTS * PARTS)  # block, output, part: neighbours read neighbours
    part = lane % PARTS
    output = tile * OUTPUTS + lane // PARTS % OUTPUTS
    step = lane // (PARTS * OUTPUTS)
    byte = part[:, None] * 16 + tl.arange(0, 16)[None, :]
    wide = tl.zeros((), tl.int64) + outputs  # offsets may pass 2^31
    here = (step * wide + output)[:, None] * BYTES + byte
    there = step[:, None] * BLOCK + byte
    is_output = output < outputs
    total = tl.zeros((BLOCKS * OUTPUTS * PARTS,), tl.float32)
    stored = tl.load(integers + here, mask=((step < blocks) & is_output)[:, None], other=0)
    wait_for_the_one_before(OVERLAPS)
    for first in range(0, blocks, BLOCKS):
        block = first + step
        is_lane = (block < blocks) & is_output
        behind = first + BLOCKS
        is_behind = (behind + step < blocks) & is_output
        coming = tl.load(integers + behind * BYTES * wide + here, mask=is_behind[:, None], other=0)
        is_there = is_lane[:, None]
        if IS_CUT:
            is_there = is_there & (first * BLOCK + there < inputs)
        values = tl.load(x + first * BLOCK + there, mask=is_there, other=0).to(tl.float32)
        factor = scale
        zero = None
        least = None
        if PER_GROUP:
            group = (block * 2 if IS_HALVED else block // PER_GROUP) * wide + output
            factor = scales_of(scale, group, is_lane, NUMBERS, IS_SHIFTED)
            if zero_point is not None:
                zero = zero_points_of(zero_point, block // PER_GROUP, wide, output, is_lane)
            if minimum is not None:
                least = tl.load(minimum + group, mask=is_lane, other=0).to(tl.float32)
        if BITS == 4:
            low = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, tl.float32, False)
            added = tl.sum(low * values, 1)
            if IS_HALVED:
                total += added * factor
                factor = tl.load(scale + (block * 2 + 1) * wide + output, mask=is_lane, other=0).to(tl.float32)
                added = tl.zeros_like(total)
            if IS_CUT:
                is_there = is_lane[:, None] & (first * BLOCK + BYTES + there < inputs)
            values = tl.load(x + first * BLOCK + BYTES + there, mask=is_there, other=0).to(tl.float32)
            high = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, tl.float32, True)
            added += tl.sum(high * values, 1)
        else:
            whole = numbers_that_scale(stored, factor, zero, least, BITS, NUMBERS, tl.float32, False)
            added = tl.sum(whole * values, 1)
        if PER_GROUP == 0 or minimum is not None:
            total += added
        else:
            total += added * factor
        stored = coming
    let_the_next_begin(OVERLAPS)
    sums = tl.sum(tl.sum(tl.reshape(total, (BLOCKS, OUTPUTS, PARTS)), 2), 0)
    one = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    if PER_GROUP == 0:
        factor = tl.load(scale + one, mask=one < outputs, other=0).to(tl.float32)
        sums = sums * (factor * 256.0 if NUMBERS == "fp8" else factor)
    if divisor is not None:
        sums = sums / tl.load(divisor)
    if bias is not None:
        sums = sums + tl.load(bias + one, mask=one < outputs, other=0).to(tl.float32)
    return sums


@triton.jit
def _store_row(out, sums, row, outputs, tile, OUTPUTS: tl.constexpr):
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(out + row * outputs + output, sums.to(out.dtype.element_ty), mask=output < outputs)


@triton.jit
def multiply_row(
    x, integers, scale, zero_point, minimum, divisor, bias, out, outputs, inputs, blocks,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, PER_GROUP: tl.constexpr, IS_HALVED: tl.constexpr,
    IS_CUT: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS outputs of one row, without a product of tiles; the program is (row, output tile)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sums = _row_sums(
        x + row * inputs, integers, scale, zero_point, minimum, divisor, bias, outputs, inputs, blocks, tile,
        BITS, NUMBERS, BLOCK, PER_GROUP, IS_HALVED, IS_CUT, OUTPUTS, BLOCKS, OVERLAPS,
    )  # fmt: skip
    _store_row(out, sums, row, outputs, tile, OUTPUTS)


@triton.jit
def multiply_row_by_some(
    x, integers, scale, zero_point, minimum, bias, out, outputs,
    integers_1, scale_1, zero_point_1, minimum_1, bias_1, out_1, outputs_1,
    integers_2, scale_2, zero_point_2, minimum_2, bias_2, out_2, outputs_2, inputs, blocks,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, PER_GROUP: tl.constexpr, IS_HALVED: tl.constexpr,
    IS_CUT: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute `multiply_row` for two weights of one layout, or three; the tiles of one come after those of another.

    ACTIVATION: see `multiply_by_some`.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tiles = tl.cdiv(outputs, OUTPUTS)
    x += row * inputs
    if tile < tiles:
        sums = _row_sums(
            x, integers, scale, zero_point, minimum, None, bias, outputs, inputs, blocks, tile,
            BITS, NUMBERS, BLOCK, PER_GROUP, IS_HALVED, IS_CUT, OUTPUTS, BLOCKS, OVERLAPS,
        )  # fmt: skip
        if ACTIVATION >= 0:
            DTYPE: tl.constexpr = x.dtype.element_ty
            second = _row_sums(
                x, integers_1, scale_1, zero_point_1, minimum_1, None, bias_1, outputs, inputs, blocks, tile,
                BITS, NUMBERS, BLOCK, PER_GROUP, IS_HALVED, IS_CUT, OUTPUTS, BLOCKS, False,
            )  # fmt: skip
            sums = activation_of(sums.to(DTYPE).to(tl.float32), ACTIVATION).to(DTYPE).to(tl.float32)
            sums *= second.to(DTYPE).to(tl.float32)
        _store_row(out, sums, row, outputs, tile, OUTPUTS)
    elif ACTIVATION < 0:
        tile -= tiles
        tiles = tl.cdiv(outputs_1, OUTPUTS)
        if tile < tiles:
            sums = _row_sums(
                x, integers_1, scale_1, zero_point_1, minimum_1, None, bias_1, outputs_1, inputs, blocks, tile,
                BITS, NUMBERS, BLOCK, PER_GROUP, IS_HALVED, IS_CUT, OUTPUTS, BLOCKS, OVERLAPS,
            )  # fmt: skip
            _store_row(out_1, sums, row, outputs_1, tile, OUTPUTS)
        elif integers_2 is not None:
            sums = _row_sums(
                x, integers_2, scale_2, zero_point_2, minimum_2, None, bias_2, outputs_2, inputs, blocks, tile - tiles,
                BITS, NUMBERS, BLOCK, PER_GROUP, IS_HALVED, IS_CUT, OUTPUTS, BLOCKS, OVERLAPS,
            )  # fmt: skip
            _store_row(out_2, sums, row, outputs_2, tile - tiles, OUTPUTS)
