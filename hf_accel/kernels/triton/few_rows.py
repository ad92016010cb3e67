"""A few rows times quantized weights of one layout: a weight goes from memory straight into the products.

A tile of `multiply` copies the weight to shared memory first, and each of its stages waits for all threads. Here a
thread reads 16 bytes of an output at a time, which are its part of the operand of a product as they are: the order of
inputs within a block does not matter, if rows have the same. On an H200 a head in INT8 is read at 4.3 TB/s, which is
what a copy reaches there, and by `multiply` at 3.7. Stages of shared memory (num_stages=3 and more) made it slower.
With more rows programs wait for those, which each reads again: a gate of 28,672 outputs takes 41 us of 16 rows and
56 us of 32, and 45 and 65 us by `multiply`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .blocked_weight import BlockedWeight, LinearTile
from .launch import Launch
from .layer_parts import GATES
from .programs.multiply_few import EIGHT, multiply_few

MOST_TOGETHER = 3  # weights of one launch
MOST_ROWS: int = EIGHT.value  # of a tile
MOST_GATED_PARTS = 4  # blocks of both weights of a gate that a warp reads at a time
MOST_SUMS = 1024  # of a warp: 32 registers of each thread; blocks of few bytes have as many as others


def takes_few_rows(weight: BlockedWeight, dtype: torch.dtype) -> bool:
    """Return whether `few_launch` can multiply rows of `dtype` by the weight."""
    return dtype.itemsize == 2 and not weight.is_stacked


def few_launch(
    x: Tensor, weights: Sequence[BlockedWeight], biases: Sequence[Tensor | None], outs: Sequence[Tensor], *,
    tile: LinearTile, activation: str | None = None,
) -> Launch:  # fmt: skip
    """Return the launch that computes x [rows, in] @ W^T + bias for up to three weights of a layout, each in its out.

    activation: a name of GATES: outs[0] becomes activation(the first) * the second, of two weights of one shape.
    tile: one of a multiple of 8 rows, and the inputs that are read at a time, a power of 2 of blocks for each warp.
    With more than 8 rows its outputs are those of both weights of a gate.
    """
    first = weights[0]
    assert tile.inputs is not None
    most = MOST_SUMS // (tile.outputs * tile.rows)
    if activation is not None:  # the registers of a thread hold the bytes of both weights
        most = min(most, MOST_GATED_PARTS)
    parts = min(tile.inputs // first.block, most * tile.num_warps)
    arguments = arguments_of([*weights, *[None] * (MOST_TOGETHER - len(weights))], biases, outs)
    outputs = tile.outputs // 2 if activation is not None and tile.rows > MOST_ROWS else tile.outputs
    is_whole = first.num_blocks % parts == 0 and all(out.shape[1] % outputs == 0 for out in outs)
    return Launch(
        kernel=multiply_few,
        grid=(-(-len(x) // tile.rows), sum(-(-out.shape[1] // outputs) for out in outs)),
        arguments={
            **arguments, "divisor": first.divisor, "x": x, "rows": len(x), "inputs": first.in_features,
            "blocks": first.num_blocks,
        },
        constants={
            **first.constants, "IS_CUT": bool(first.in_features % first.block), "IS_WHOLE": is_whole,
            "OUTPUTS": outputs, "ROWS": tile.rows, "PARTS": parts,
            "ACTIVATION": -1 if activation is None else GATES[activation],
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


def arguments_of(
    weights: Sequence[BlockedWeight | None], biases: Sequence[Tensor | None], outs: Sequence[Tensor]
) -> dict[str, Any]:
    """Return the arguments by which a program reads several weights and writes to `outs`; those of None are None."""
    found: dict[str, Any] = {}
    for i, weight in enumerate(weights):
        suffix = f"_{i}" if i else ""
        names = ("integers", "scale", "zero_point", "minimum")
        operands = dict.fromkeys(names) if weight is None else weight.operands
        found |= {f"{name}{suffix}": operands[name] for name in names}
        found[f"bias{suffix}"] = None if weight is None else biases[i]
        found[f"out{suffix}"] = outs[i] if i < len(outs) else None
        found[f"outputs{suffix}"] = 0 if weight is None or i >= len(outs) else weight.out_features
    return found
