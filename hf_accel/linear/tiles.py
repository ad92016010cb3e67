"""Which tile the Triton kernel takes, by the number of rows and the shape of the weight: a rule.

Each tile fits the registers of every GPU that is served, with every format of a weight that it is taken for.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..kernels.triton.quantized_linear import BlockedWeight, LinearTile

PROGRAMS = 256  # that keep a large GPU busy: two for each of its multiprocessors
INPUTS = 1024  # of a split at least: partial sums of smaller ones are more than 1.5 % of the bytes of one row
INPUTS_PER_ROW = 128  # of a split at least: partial sums stay in the cache, but they take time as well

ONE_TILE = LinearTile(outputs=64, rows=32, num_stages=3)  # for any number of rows
FEW = LinearTile(outputs=128, rows=16, num_warps=8)
MANY = {bits: LinearTile(outputs=128, rows=64, num_warps=8, num_stages=stages) for bits, stages in ((4, 4), (8, 3))}
MANY_WITHOUT_GROUPS = LinearTile(outputs=128, rows=128, num_warps=8, num_stages=3)
FLOAT32 = LinearTile(outputs=32, rows=16)  # its products take the ordinary cores, and more registers


def tiles_of(weight: BlockedWeight, dtype: torch.dtype) -> list[LinearTile]:
    """All that serve a weight and rows of `dtype`, from that for the fewest rows to that for any number."""
    if dtype is torch.float32:
        return [FLOAT32]
    return [FEW, ONE_TILE, MANY[weight.bits] if weight.blocks_per_group else MANY_WITHOUT_GROUPS]


def one_tile(dtype: torch.dtype) -> LinearTile:
    """The tile that serves any number of rows of `dtype`, without splits."""
    return FLOAT32 if dtype is torch.float32 else ONE_TILE


def for_experts(tile: LinearTile) -> LinearTile:
    """The tile for a launch over all experts, which needs more registers for each stage."""
    return replace(tile, splits=1, num_stages=2)


def tile_for(rows: int, weight: BlockedWeight, dtype: torch.dtype) -> LinearTile:
    """dtype: of the rows. Where programs are few, several share the inputs, so that all multiprocessors read."""
    tiles = tiles_of(weight, dtype)
    tile = next((tile for tile in tiles if rows <= tile.rows), tiles[-1])
    programs = -(-weight.out_features // tile.outputs) * -(-rows // tile.rows)
    most = weight.in_features // max(INPUTS, INPUTS_PER_ROW * rows)
    return replace(tile, splits=max(1, min(most, -(-PROGRAMS // max(1, programs)))))
