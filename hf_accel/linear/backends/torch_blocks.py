"""FP8 rows times an FP8 weight through torch's own product of blocks, which is cuBLAS's: on Hopper, for many rows.

A scale belongs to a row, or an output, and 128 inputs, as in our own programs, and rows are rounded by the same one:
only the order of sums differs, so that the faster of both may be taken. What torch has for other GPUs, and for
integers, has one scale for a whole row. That is another rounding, and no candidate (see `torch_int_mm`).
Source of the layouts: torch, aten/src/ATen/native/cuda/ScaledBlas.cpp, scaling of 1x128 blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import ACTIVATION_GROUP
from ...kernels import triton as kernels
from ...kernels.triton.quantized_linear import BlockedWeight, LinearTile, quantized_linear, rounding
from ..formats import FLOAT8

MAJOR = 9  # compute capability 9.0; torch refuses these scales before and after
MULTIPLE = 16  # rows and outputs that cuBLAS takes
WORD = torch.int64  # what bytes are moved as: one by one they take longer


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


def multiply(x: Tensor, weight: BlockedWeight, bias: Tensor | None, tile: LinearTile | TorchBlocks) -> Tensor:
    """x [rows, in], contiguous -> [rows, out] in x's dtype: x @ W^T + bias."""
    if isinstance(tile, TorchBlocks):
        return tile.run(x, weight, bias)
    return quantized_linear(x, weight, bias, tile=tile)
