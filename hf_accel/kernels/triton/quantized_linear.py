"""Rows times a quantized weight, whose integers are read once for each tile of rows and become floats in registers.

A weight [out, in] is stored block of inputs by block, `[blocks, out, bytes of a block]`, so that what a program reads
of a block lies side by side whatever the size of a group is. With 4 bits, byte i of a block holds input i in its low
half and input i + block / 2 in its high half, each a two's complement number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch

REDUCED = 1024  # numbers that one program adds up over the splits


@dataclass(frozen=True, kw_only=True)
class LinearTile:
    """What one program computes: outputs x rows, over one of `splits` parts of the inputs.

    The partial sums of several splits are written in float32 and added up in order.
    """

    outputs: int
    rows: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockedWeight:
    """integers: uint8 (two 4-bit numbers) or int8, [blocks, out, bytes]. scale: floating point, [groups, out].

    zero_point: int8 [groups, out], with 4 bits less 8. minimum: [groups, out]. w = (q - zero_point) * scale, or with
    minima w = (q + 8 with 4 bits, else q) * scale - minimum. in_features: inputs; the last block may have fewer.
    """

    integers: Tensor
    scale: Tensor
    in_features: int
    zero_point: Tensor | None = None
    minimum: Tensor | None = None

    @property
    def bits(self) -> int:
        return 4 if self.integers.dtype is torch.uint8 else 8

    @property
    def block(self) -> int:
        """Inputs of a block."""
        return self.integers.shape[-1] * 8 // self.bits

    @property
    def num_blocks(self) -> int:
        return self.integers.shape[-3]

    @property
    def out_features(self) -> int:
        return self.integers.shape[-2]

    @property
    def blocks_per_group(self) -> int:
        """0 if scales belong to outputs."""
        groups = self.scale.shape[-2]
        return 0 if groups == 1 and self.bits == 8 and self.minimum is None else self.num_blocks // groups


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    integers, scale, zero_point, minimum, BITS: tl.constexpr, DTYPE: tl.constexpr
):
    """int8 [outputs, inputs], 4-bit numbers times 16 -> what `scale` is to multiply, in DTYPE; with minima the weight.

    scale: of the numbers as they come, with zero points of the numbers.
    """
    if minimum is not None:
        above = 128 if BITS == 4 else 0
        return ((integers.to(tl.float32) + above) * scale[:, None] - minimum[:, None]).to(DTYPE)
    if zero_point is not None:
        integers = (integers >> 4) - zero_point[:, None]
    return integers.to(tl.float32).to(DTYPE)


@triton.jit  # type: ignore[untyped-decorator]
def _rows_of_expert(  # type: ignore[no-untyped-def]
    starts, row_tile, ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr
):
    """(expert, rows, which of them are its) of a tile, if each expert has as many as it needs; EXPERTS: of none."""
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


@triton.jit  # type: ignore[untyped-decorator]
def quantized_linear_kernel(  # type: ignore[no-untyped-def]
    x, integers, scale, zero_point, minimum, bias, out, starts, rows, outputs, inputs, blocks, groups, share,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PER_GROUP: tl.constexpr, IS_CUT: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_2: tl.constexpr,
):  # fmt: skip
    """Program (row tile, output tile, split). out: [splits, rows, outputs]. share: blocks of inputs of a split.

    starts: int64 [EXPERTS + 1], the first row of each expert, whose weights lie one after the other; or None.
    EXPERTS_2: EXPERTS up to a power of 2.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
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
    here = output[:, None] * BYTES + byte[None, :]
    wide = tl.zeros((), tl.int64) + outputs  # offsets may pass 2^31
    if starts is not None:
        expert, row, is_row = _rows_of_expert(starts, row_tile, ROWS, EXPERTS, EXPERTS_2)
        last = tl.where(expert < EXPERTS, last, first)  # there may be more tiles than any expert needs
        expert = tl.minimum(expert, EXPERTS - 1)
        from_x = x + row[None, :] * inputs + byte[:, None]
        integers += expert * blocks * wide * BYTES
        scale += expert * groups * wide
        if zero_point is not None:
            zero_point += expert * groups * wide
        if minimum is not None:
            minimum += expert * groups * wide
        if bias is not None:
            bias += expert * wide
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for block in range(first, last):
        stored = tl.load(integers + block * BYTES * wide + here, mask=is_output[:, None], other=0)
        factor = scale
        zero = None
        least = None
        if PER_GROUP:
            group = block // PER_GROUP * wide + output
            factor = tl.load(scale + group, mask=is_output, other=0).to(tl.float32)
            if BITS == 4 and zero_point is None:
                factor *= 0.0625  # shifting both halves to the right would take longer
            if zero_point is not None:
                zero = tl.load(zero_point + group, mask=is_output, other=0)
            if minimum is not None:
                least = tl.load(minimum + group, mask=is_output, other=0).to(tl.float32)
        start = block * BLOCK
        is_there = is_row[None, :]
        if IS_CUT:
            is_there = is_there & (start + byte < inputs)[:, None]
        values = tl.load(from_x + start, mask=is_there, other=0)
        added = total if (PER_GROUP == 0 or minimum is not None) else tl.zeros((OUTPUTS, ROWS), tl.float32)
        if BITS == 4:
            low = _weights((stored << 4).to(tl.int8, bitcast=True), factor, zero, least, BITS, DTYPE)
            added = tl.dot(low, values, added, input_precision="ieee")
            values = tl.load(from_x + start + BYTES, mask=is_there, other=0)
            high = _weights((stored & 240).to(tl.int8, bitcast=True), factor, zero, least, BITS, DTYPE)
            added = tl.dot(high, values, added, input_precision="ieee")
        else:
            whole = _weights(stored, factor, zero, least, BITS, DTYPE)
            added = tl.dot(whole, values, added, input_precision="ieee")
        if PER_GROUP == 0 or minimum is not None:
            total = added
        else:
            total += added * factor[:, None]
    if PER_GROUP == 0:
        total = total * tl.load(scale + output, mask=is_output, other=0).to(tl.float32)[:, None]
    if bias is not None:
        total = total + tl.load(bias + output, mask=is_output, other=0).to(tl.float32)[:, None]
    to = out + (part.to(tl.int64) * rows + row)[None, :] * outputs + output[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def add_splits_kernel(  # type: ignore[no-untyped-def]
    partial, bias, out, numbers, outputs, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """partial float32 [SPLITS, numbers], numbers = rows * outputs -> out [numbers]."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = number < numbers
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(partial + part * numbers + number, mask=is_there, other=0)
    if bias is not None:
        total += tl.load(bias + number % outputs, mask=is_there, other=0).to(tl.float32)
    tl.store(out + number, total.to(out.dtype.element_ty), mask=is_there)


def launches(
    x: Tensor,
    weight: BlockedWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    tile: LinearTile,
    starts: Tensor | None = None,
) -> list[Launch]:
    """What computes out [rows, out] from x [rows, in], both contiguous, in order.

    starts: int64 [experts + 1], where the rows of each expert start; weight and bias are `stacked` then.
    """
    rows, outputs = out.shape
    experts = 0 if starts is None else len(starts) - 1
    share = -(-weight.num_blocks // tile.splits)
    splits = -(-weight.num_blocks // share)
    partial = out if splits == 1 else x.new_empty(splits, rows, outputs, dtype=torch.float32)
    row_tiles = -(-rows // tile.rows) if starts is None else min(rows, rows // tile.rows + experts)
    product = Launch(
        kernel=quantized_linear_kernel,
        grid=(row_tiles, -(-outputs // tile.outputs), splits),
        arguments={
            "x": x, "integers": weight.integers, "scale": weight.scale, "zero_point": weight.zero_point,
            "minimum": weight.minimum, "bias": bias if splits == 1 else None, "out": partial, "starts": starts,
            "rows": rows, "outputs": outputs, "inputs": weight.in_features, "blocks": weight.num_blocks,
            "groups": weight.scale.shape[-2], "share": share,
        },
        constants={
            "BITS": weight.bits, "BLOCK": weight.block, "PER_GROUP": weight.blocks_per_group,
            "IS_CUT": bool(weight.in_features % weight.block), "OUTPUTS": tile.outputs, "ROWS": tile.rows,
            "EXPERTS": experts, "EXPERTS_2": triton.next_power_of_2(max(1, experts)),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    if splits == 1:
        return [product]
    added = Launch(
        kernel=add_splits_kernel,
        grid=(-(-rows * outputs // REDUCED),),
        arguments={"partial": partial, "bias": bias, "out": out, "numbers": rows * outputs, "outputs": outputs},
        constants={"SPLITS": splits, "BLOCK": REDUCED},
    )
    return [product, added]


def quantized_linear(
    x: Tensor, weight: BlockedWeight, bias: Tensor | None, *, tile: LinearTile, starts: Tensor | None = None
) -> Tensor:
    """x [rows, in], contiguous -> [rows, out] in x's dtype: x @ W^T + bias, summed in float32.

    starts: as `launches` has it, with bias [experts, out] and a tile without splits.
    """
    out = x.new_empty(len(x), weight.out_features)
    for launch in launches(x, weight, bias, out, tile=tile, starts=starts):
        launch.run()
    return out


def stacked(weights: Sequence[BlockedWeight]) -> BlockedWeight:
    """Weights of one shape one after the other, [experts, ...] in each tensor."""

    def joined(name: str) -> Tensor | None:
        parts = [getattr(weight, name) for weight in weights]
        return None if parts[0] is None else torch.stack(parts)

    tensors: dict[str, Any] = {name: joined(name) for name in ("integers", "scale", "zero_point", "minimum")}
    return replace(weights[0], **tensors)


def parts_of_stack(weight: BlockedWeight) -> list[BlockedWeight]:
    """Views of what was `stacked`."""
    names = [name for name in ("integers", "scale", "zero_point", "minimum") if getattr(weight, name) is not None]
    count = len(weight.integers)
    return [replace(weight, **{name: getattr(weight, name)[i] for name in names}) for i in range(count)]
