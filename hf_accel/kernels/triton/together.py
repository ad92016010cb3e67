"""Rows times several quantized weights in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .blocked_weight import TENSORS, BlockedWeight, LinearTile
from .few_rows import MOST_TOGETHER, arguments_of, few_launch
from .launch import Launch
from .layer_parts import GATES
from .programs.multiply import multiply_by_some

MOST_STAGES = 6  # of a gate, whose weights have a loop each, and each loop its stages in shared memory


def go_together(weights: Sequence[BlockedWeight]) -> bool:
    """Return whether one launch can multiply rows by these weights."""
    first = weights[0]
    return 2 <= len(weights) <= MOST_TOGETHER and all(
        weight.constants == first.constants and weight.in_features == first.in_features
        and weight.divisor is None and not weight.is_stacked
        and all((getattr(weight, name) is None) == (getattr(first, name) is None) for name in TENSORS)
        for weight in weights
    )  # fmt: skip


def together_launch(
    x: Tensor, weights: Sequence[BlockedWeight], biases: Sequence[Tensor | None], outs: Sequence[Tensor], *,
    tile: LinearTile, activation: str | None = None,
) -> Launch:  # fmt: skip
    """Return the launch that computes x [rows, in] @ W^T + bias for weights that `go_together`, each in its out.

    activation: a name of GATES: outs[0] becomes activation(the first) * the second, of two weights of one shape.
    """
    first = weights[0]
    if tile.inputs is not None:
        return few_launch(x, weights, biases, outs, tile=tile, activation=activation)
    arguments = arguments_of([*weights, *[None] * (MOST_TOGETHER - len(weights))], biases, outs)
    tiles = sum(-(-out.shape[1] // tile.outputs) for out in outs)
    constants = {"ACTIVATION": -1 if activation is None else GATES[activation]}
    arguments |= {"x": x, "rows": len(x), "inputs": first.in_features, "blocks": first.num_blocks}
    return Launch(
        kernel=multiply_by_some, grid=(-(-len(x) // tile.rows), tiles), arguments=arguments,
        constants={
            **first.constants, "IS_CUT": bool(first.in_features % first.block), "OUTPUTS": tile.outputs,
            "ROWS": tile.rows, **constants,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages if activation is None else min(tile.num_stages, MOST_STAGES),
    )  # fmt: skip
