"""Rows times a quantized weight, whose integers are read once for each tile of rows.

They become floats in registers, or rows are rounded to INT8 first, in each group of inputs, and the products are
integers. An FP8 weight has floats of a byte instead of integers, and rows are rounded to the same format.

A weight [out, in] is stored block of inputs by block, `[blocks, out, bytes of a block]`, so that what a program reads
of a block lies side by side whatever the size of a group is. With 4 bits, byte i of a block holds input i in its low
half and input i + block / 2 in its high half, each a two's complement number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from .blocked_weight import TENSORS, BlockedWeight, LinearTile
from .few_rows import few_launch
from .launch import Launch
from .programs.multiply import add_splits, multiply, numbers
from .programs.multiply_integers import multiply_integers, round_rows

REDUCED = 1024  # numbers that one program adds up over the splits
ROUNDED = 1024  # numbers that one program rounds
WRITTEN = 32  # outputs of which one program writes a block


def launches(
    x: Tensor,
    weight: BlockedWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    tile: LinearTile,
    starts: Tensor | None = None,
) -> list[Launch]:
    """Return the launches that compute out [rows, out] from x [rows, in], both contiguous, in order.

    starts: int64 [experts + 1], where the rows of each expert start; weight and bias are `stacked` then.
    """
    if tile.rounded:
        return _rounded_launches(x, weight, bias, out, tile=tile, starts=starts)
    if tile.inputs is not None:
        assert starts is None, "a tile of few rows serves one weight"
        return [few_launch(x, [weight], [bias], [out], tile=tile)]
    rows, outputs = out.shape
    share = -(-weight.num_blocks // tile.splits)
    splits = -(-weight.num_blocks // share)
    partial = out if splits == 1 else x.new_empty(splits, rows, outputs, dtype=torch.float32)
    product = Launch(
        kernel=multiply,
        grid=(*_programs(out, tile, starts), splits),
        arguments={
            **weight.operands, "x": x, "bias": bias if splits == 1 else None, "out": partial, "starts": starts,
            "rows": rows, "groups": weight.scale.shape[-2], "share": share,
        },
        constants={
            **weight.constants, "IS_CUT": bool(weight.in_features % weight.block), **_constants(tile, starts),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    if splits == 1:
        return [product]
    added = Launch(
        kernel=add_splits,
        grid=(-(-rows * outputs // REDUCED),),
        arguments={"partial": partial, "bias": bias, "out": out, "numbers": rows * outputs, "outputs": outputs},
        constants={"SPLITS": splits, "BLOCK": REDUCED},
    )
    return [product, added]


def numbers_launch(weight: BlockedWeight, out: Tensor) -> Launch:
    """Return the launch that writes the weight [out, in] to `out`, contiguous, rounded to its dtype."""
    return Launch(
        kernel=numbers,
        grid=(weight.num_blocks, -(-weight.out_features // WRITTEN)),
        arguments={**weight.operands, "out": out},
        constants={**weight.constants, "OUTPUTS": WRITTEN},
    )


def rounding(x: Tensor, weight: BlockedWeight, *, room: int) -> tuple[Launch, Tensor, Tensor]:
    """Return the launch that rounds x [rows, in], contiguous, in each group of inputs, to numbers of the weight's
    kind.

    Also returns what it writes: levels [room, in up to whole groups], int8, or FP8 as bytes, and float32 factors
    [room, groups]. Beyond x's rows they hold anything.
    """
    per_group = weight.blocks_rounded
    group, groups = per_group * weight.block, -(-weight.num_blocks // per_group)
    levels = x.new_empty(room, groups * group, dtype=torch.uint8 if weight.is_fp8 else torch.int8)
    factors = x.new_empty(room, groups, dtype=torch.float32)
    width = triton.next_power_of_2(group)
    together = max(1, ROUNDED // width)
    launch = Launch(
        kernel=round_rows,
        grid=(len(x), -(-groups // together)),
        arguments={"x": x, "levels": levels, "factors": factors, "inputs": weight.in_features, "groups": groups},
        constants={"FP8": weight.is_fp8, "GROUP": group, "GROUP_2": width, "GROUPS": together},
    )
    return launch, levels, factors


def _rounded_launches(
    x: Tensor, weight: BlockedWeight, bias: Tensor | None, out: Tensor, *, tile: LinearTile, starts: Tensor | None
) -> list[Launch]:
    rounded, levels, factors = rounding(x, weight, room=len(x))
    rows, groups, per_group = len(x), factors.shape[1], weight.blocks_rounded
    product = Launch(
        kernel=multiply_integers,
        grid=_programs(out, tile, starts),
        arguments={
            "levels": levels, "factors": factors, "integers": weight.readable, "scale": weight.scale,
            "zero_point": weight.zero_point, "bias": bias, "out": out, "starts": starts, "rows": rows,
            "outputs": weight.out_features, "blocks": weight.num_blocks, "groups": groups,
        },
        constants={
            "BITS": weight.bits, "FP8": weight.is_fp8, "BLOCK": weight.block, "PER_GROUP": per_group,
            "BY_GROUP": weight.blocks_per_group > 0, "IS_CUT": bool(weight.num_blocks % per_group),
            **_constants(tile, starts),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return [rounded, product]


def _programs(out: Tensor, tile: LinearTile, starts: Tensor | None) -> tuple[int, int]:
    """Return the number of tiles of rows, where each expert may need one that is not full, and of tiles of outputs."""
    rows, outputs = out.shape
    row_tiles = -(-rows // tile.rows) if starts is None else min(rows, rows // tile.rows + len(starts) - 1)
    return row_tiles, -(-outputs // tile.outputs)


def _constants(tile: LinearTile, starts: Tensor | None) -> dict[str, int]:
    experts = 0 if starts is None else len(starts) - 1
    experts_2 = triton.next_power_of_2(max(1, experts))
    return {"OUTPUTS": tile.outputs, "ROWS": tile.rows, "EXPERTS": experts, "EXPERTS_2": experts_2}


def quantized_linear(
    x: Tensor, weight: BlockedWeight, bias: Tensor | None, *, tile: LinearTile, starts: Tensor | None = None
) -> Tensor:
    """Compute x @ W^T + bias for x [rows, in], contiguous -> [rows, out] in x's dtype.

    starts: see `launches`, with bias [experts, out] and a tile without splits.
    """
    out = x.new_empty(len(x), weight.out_features)
    for launch in launches(x, weight, bias, out, tile=tile, starts=starts):
        launch.run()
    return out


def stacked(weights: Sequence[BlockedWeight]) -> BlockedWeight:
    """Stack weights of one shape, [experts, ...] in each tensor."""

    def joined(name: str) -> Tensor | None:
        parts = [getattr(weight, name) for weight in weights]
        return None if parts[0] is None else torch.stack(parts)

    tensors: dict[str, Any] = {name: joined(name) for name in TENSORS}
    return replace(weights[0], **tensors)


def parts_of_stack(weight: BlockedWeight) -> list[BlockedWeight]:
    """Return views of the weights that were `stacked`."""
    names = [name for name in TENSORS if getattr(weight, name) is not None]
    count = len(weight.integers)
    return [replace(weight, **{name: getattr(weight, name)[i] for name in names}) for i in range(count)]
