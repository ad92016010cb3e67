"""The tile of the Triton kernels, by the number of rows and the shape of the weight: the measured one, or a rule's.

Where torch has a product of the same meaning, measuring may choose that.

Each tile fits the registers of every GPU that is served, with every format of a weight that it is taken for.

TorchBlocks is FP8 rows times an FP8 weight through torch's own product of blocks, which is cuBLAS's: on Hopper, for
many rows. A scale belongs to a row, or an output, and 128 inputs, as in our own programs, and rows are rounded by the
same one: only the order of sums differs, so that the faster of both may be taken. What torch has for other GPUs, and
for integers, has one scale for a whole row. That is another rounding, and no candidate (see `torch_int_mm`).
Source of the layouts: torch, aten/src/ATen/native/cuda/ScaledBlas.cpp, scaling of 1x128 blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import Layout
from ...kernels import ACTIVATION_GROUP
from ...kernels import triton as kernels
from ...kernels.triton.blocked_weight import BlockedWeight, LinearTile
from ...kernels.triton.few_rows import MOST_ROWS, takes_few_rows
from ...kernels.triton.quantized_linear import numbers_launch, quantized_linear, rounding
from ..formats import FLOAT8
from .backend import FEW_ROWS, Rounding

PROGRAMS = 512  # that keep a large GPU busy: four for each of its multiprocessors
INPUTS = 512  # of a split at least: partial sums of smaller ones are more than 3 % of the bytes of one row
INPUTS_PER_ROW = 64  # of a split at least: partial sums stay in the cache, but they take time as well

EIGHT = ((4, 2), (8, 2), (16, 4), (32, 4), (32, 8))  # of up to 8 rows: blocks of 64 bytes at a time, and warps
EIGHT_BITS = 64 * 8  # of a block of an output
MORE = ((16, 4, 4), (32, 4, 4))  # of up to so many rows, where outputs are many: the same blocks, and warps
MANY_OUTPUTS = 2**13  # from which the first of EIGHT is the fastest on an H200, and else the last: programs are many
ONE_TILE = LinearTile(outputs=64, rows=32, num_stages=3)  # for any number of rows
FEW = LinearTile(
    outputs=32, rows=16, num_warps=2, num_stages=10
)  # memory is far: much of it must be asked for at once
WIDE = LinearTile(outputs=64, rows=32, num_stages=6)
MANY = {bits: LinearTile(outputs=128, rows=64, num_warps=8, num_stages=stages) for bits, stages in ((4, 4), (8, 3))}
MANY_WITHOUT_GROUPS = LinearTile(outputs=128, rows=128, num_warps=8, num_stages=3)
FLOAT32 = LinearTile(outputs=32, rows=16)  # its products take the ordinary cores, and more registers
_ROUNDED = LinearTile(outputs=128, rows=64, num_warps=8, num_stages=3, rounded="int8")
INTEGERS = [
    LinearTile(outputs=32, rows=16, num_warps=2, rounded="int8"), _ROUNDED,
    LinearTile(outputs=64, rows=128, num_warps=4, num_stages=3, rounded="int8"),
]  # fmt: skip
INTEGERS4 = [LinearTile(outputs=64, rows=16, num_stages=3, rounded="int8"), _ROUNDED]  # 4 bits take more registers
FLOATS8 = [replace(tile, rounded="fp8") for tile in INTEGERS]

MOST_NUMBERS = 2**28  # of a weight that is held as numbers while a call lasts: half a gigabyte
NUMBERS_ROWS = 768  # from which that is faster on an H200, where nothing was measured

MAJOR = 9  # compute capability 9.0; torch refuses these scales before and after
MULTIPLE = 16  # rows and outputs that cuBLAS takes
WORD = torch.int64  # what bytes are moved as: one by one they take longer


@dataclass(frozen=True)
class Dequantized:
    """Stands where a LinearTile may stand, for many rows: torch multiplies by the weight as numbers of 16 bits, which
    it has for as long as a call lasts.

    torch's product is nearer to the hardware's limit than any of ours. The weight is rounded, and rows are not.
    """

    rounded = None

    def __str__(self) -> str:
        return "torch's product of the weight's numbers"

    def run(self, x: Tensor, weight: BlockedWeight, bias: Tensor | None) -> Tensor:
        """x [rows, in], contiguous, of 16 bits -> [rows, out]: x @ W^T + bias."""
        dense = x.new_empty(weight.out_features, weight.in_features)
        numbers_launch(weight, dense).run()
        return F.linear(x, dense, None if bias is None else bias.to(x.dtype))


@dataclass(frozen=True)
class TorchBlocks:
    """Stands where a LinearTile may stand. The weight is copied output by output first, while a call lasts."""

    rounded = "fp8"

    def __str__(self) -> str:
        return "torch._scaled_mm"

    def run(self, x: Tensor, weight: BlockedWeight, bias: Tensor | None) -> Tensor:
        """x [rows, in], contiguous, bfloat16 -> [rows, out]: x @ W^T + bias."""
        launch, levels, factors = rounding(x, weight, room=-(-len(x) // MULTIPLE) * MULTIPLE)
        launch.run()
        of_rows = factors.t().contiguous().t()  # [rows, groups], the rows side by side
        of_outputs = weight.scale.float().expand(factors.shape[1], -1).contiguous()  # [groups, out]
        out: Tensor = torch._scaled_mm(
            levels.view(FLOAT8), by_output(weight).t(), scale_a=of_rows, scale_b=of_outputs,
            bias=None if bias is None else bias.to(x.dtype), out_dtype=x.dtype,
        )  # fmt: skip
        return out[: len(x)]


def by_output(weight: BlockedWeight) -> Tensor:
    """The FP8 numbers [out, in]: a copy."""
    words = weight.readable.view(WORD).transpose(0, 1).flatten(1)
    return words.view(torch.uint8).view(FLOAT8)


def serves(weight: BlockedWeight, dtype: torch.dtype) -> bool:
    """Return whether torch has a product of the same meaning for a weight and rows of `dtype`, on this GPU."""
    whole = weight.in_features % ACTIVATION_GROUP == 0 == weight.out_features % MULTIPLE
    grouped = weight.is_fp8 and weight.blocks_rounded * weight.block == ACTIVATION_GROUP
    return grouped and whole and not weight.is_stacked and dtype is torch.bfloat16 and kernels.capability()[0] == MAJOR


def takes_numbers(rows: int, weight: BlockedWeight, dtype: torch.dtype, rounding: Rounding) -> bool:
    """Return whether so many rows may be multiplied by the weight's numbers, rounded to `dtype`."""
    fits = not weight.is_stacked and weight.out_features * weight.in_features <= MOST_NUMBERS
    return fits and rounding == "many rows" and rows > FEW_ROWS and dtype is not torch.float32


def multiply(x: Tensor, weight: BlockedWeight, bias: Tensor | None, tile: Tile) -> Tensor:
    """x [rows, in], contiguous -> [rows, out] in x's dtype: x @ W^T + bias."""
    if not isinstance(tile, LinearTile):
        return tile.run(x, weight, bias)
    return quantized_linear(x, weight, bias, tile=tile)


Tile = LinearTile | TorchBlocks | Dequantized


class TileKey(NamedTuple):
    """The key of a choice of tiles, besides the GPU and the rows.

    block: see BlockedWeight. is_stacked: torch's products take one weight at a time.
    """

    out_features: int
    in_features: int
    layout: Layout
    block: int
    dtype: torch.dtype
    rounding: Rounding
    is_stacked: bool


# By key, the tile for up to so many rows, and for any more the last one; None: by the rule.
MEASURED: dict[TileKey, tuple[tuple[int, Tile | None], ...]] = {}


def key_of(weight: BlockedWeight, dtype: torch.dtype, rounding: Rounding) -> TileKey:
    return TileKey(
        weight.out_features, weight.in_features, weight.layout, weight.block, dtype, rounding, weight.is_stacked,
    )  # fmt: skip


def tiles_of(weight: BlockedWeight, dtype: torch.dtype, rounding: Rounding = "never") -> list[LinearTile]:
    """Return all tiles for a weight and rows of `dtype`, from that for the fewest rows to that for any number."""
    few = [*eight(weight), *more(weight)] if takes_few_rows(weight, dtype) else []
    floats = [FLOAT32] if dtype is torch.float32 else [*few, FEW, WIDE, ONE_TILE]
    if dtype is not torch.float32:
        floats.append(MANY[weight.bits] if weight.blocks_per_group else MANY_WITHOUT_GROUPS)
    # Over blocks of 32 bytes the compiler of Triton 3.6 gives the widest one a few registers too few.
    rounded = FLOATS8 if weight.is_fp8 else INTEGERS if weight.bits == 8 else INTEGERS4
    rounded = rounded[:2] if weight.integers.shape[-1] < 64 else rounded
    return {"never": floats, "many rows": floats + rounded[1:], "always": rounded}[rounding]


def eight(weight: BlockedWeight) -> list[LinearTile]:
    """Return the tiles for up to eight rows, those of many outputs first."""
    return [
        LinearTile(outputs=16, rows=MOST_ROWS, inputs=parts * EIGHT_BITS // weight.bits, num_warps=warps, num_stages=1)
        for parts, warps in EIGHT
    ]


def more(weight: BlockedWeight) -> list[LinearTile]:
    """Return the tiles of more rows, for many outputs: fewer ones are faster by FEW or WIDE, which have splits."""
    if weight.out_features < MANY_OUTPUTS:
        return []
    return [
        LinearTile(outputs=32, rows=rows, inputs=parts * EIGHT_BITS // weight.bits, num_warps=warps, num_stages=1)
        for rows, parts, warps in MORE
    ]


def one_tile(weight: BlockedWeight, dtype: torch.dtype, rounding: Rounding = "never") -> LinearTile | None:
    """The tile that serves any number of rows of `dtype`, without splits; None: all give a row the same bits."""
    if rounding != "never":
        return FLOATS8[1] if weight.is_fp8 else None
    return FLOAT32 if dtype is torch.float32 else ONE_TILE


def for_experts(tile: LinearTile) -> LinearTile:
    """The tile for a launch over all experts, which needs more registers for each stage; from one of several rows."""
    return replace(tile, splits=1, num_stages=2)


def tile_for(rows: int, weight: BlockedWeight, dtype: torch.dtype, rounding: Rounding = "never") -> Tile:
    """dtype: of the rows."""
    measured = MEASURED.get(key_of(weight, dtype, rounding))
    if measured is not None:
        tile = next((tile for most, tile in measured if rows <= most), measured[-1][1])
        if tile is not None:
            return tile
    return by_rule(rows, weight, dtype, rounding)


def by_rule(rows: int, weight: BlockedWeight, dtype: torch.dtype, rounding: Rounding) -> Tile:
    """Choose a tile by rule: if programs are few, several share the inputs, so that all multiprocessors read."""
    key = rows, key_of(weight, dtype, rounding), takes_few_rows(weight, dtype)
    if key not in _RULED:
        _RULED[key] = _by_rule(rows, weight, dtype, rounding)
    return _RULED[key]


_RULED: dict[tuple[int, TileKey, bool], Tile] = {}  # a pass asks again and again, and the host is often late


def _by_rule(rows: int, weight: BlockedWeight, dtype: torch.dtype, rounding: Rounding) -> Tile:
    if rows >= NUMBERS_ROWS and takes_numbers(rows, weight, dtype, rounding):
        return Dequantized()
    tiles = allowed(rows, tiles_of(weight, dtype, rounding), rounding)
    if tiles[0].inputs:  # a program has few outputs: with few of them, more warps
        tiles = tiles[0 if weight.out_features >= MANY_OUTPUTS else len(EIGHT) - 1 :]
    tile = next((tile for tile in tiles if rows <= tile.rows), tiles[-1])
    if tile.rounded or tile.inputs:
        return tile
    return replace(tile, splits=min(most_splits(rows, weight), _wanted_splits(rows, weight, tile)))


def allowed(rows: int, tiles: list[LinearTile], rounding: Rounding) -> list[LinearTile]:
    """Return the tiles for so many rows: "many rows" rounds these, and no fewer ones."""
    if rounding != "many rows":
        return tiles
    return [tile for tile in tiles if bool(tile.rounded) == (rows > FEW_ROWS)]


def candidates(rows: int, weight: BlockedWeight, dtype: torch.dtype, rounding: Rounding) -> list[Tile]:
    """Return the tiles that are worth measuring for so many rows, that of the rule first.

    Left out are tiles of which most would be empty, and those that would read the weight many times. Up to 32 rows
    they are few: each takes half a second to compile, and the seconds are to suffice for all numbers of rows.
    """
    found: list[Tile] = [by_rule(rows, weight, dtype, rounding)]
    is_short = rows <= WIDE.rows and takes_few_rows(weight, dtype)
    for tile in tiles_of(weight, dtype, rounding):
        is_allowed = not tile.rounded or rows > FEW_ROWS or rounding != "many rows"
        if not is_allowed or tile.rows > max(32, 4 * rows) or 8 * tile.rows < min(rows, 512):
            continue
        if tile.inputs and rows > tile.rows:  # it would read the weight once for each of its tiles
            continue
        if is_short and not tile.inputs and tile != (FEW if rows <= FEW.rows else WIDE):
            continue
        is_whole = bool(tile.rounded or tile.inputs)
        wanted = 1 if is_whole else _wanted_splits(rows, weight, tile)
        most = 1 if is_whole else most_splits(rows, weight)
        for splits in (wanted,) if is_short else sorted({1, wanted // 2, wanted, wanted * 2}):
            if 1 <= splits <= most:
                found.append(replace(tile, splits=splits))
    if rounding != "never" and rows > FEW_ROWS and serves(weight, dtype):
        found.append(TorchBlocks())
    if takes_numbers(rows, weight, dtype, rounding):
        found.append(Dequantized())
    return list(dict.fromkeys(found))


def most_splits(rows: int, weight: BlockedWeight) -> int:
    return max(1, weight.in_features // max(INPUTS, INPUTS_PER_ROW * rows))


def _wanted_splits(rows: int, weight: BlockedWeight, tile: LinearTile) -> int:
    programs = -(-weight.out_features // tile.outputs) * -(-rows // tile.rows)
    return max(1, -(-PROGRAMS // max(1, programs)))
