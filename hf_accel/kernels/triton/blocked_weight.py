"""A quantized weight as programs read it, and the tiles by which rows are multiplied by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...config import Layout
from .. import ACTIVATION_GROUP

TENSORS = ("integers", "scale", "zero_point", "minimum", "divisor")  # of a BlockedWeight


@dataclass(frozen=True, kw_only=True)
class LinearTile:
    """The work of one program: outputs x rows, over one of `splits` parts of the inputs.

    The partial sums of several splits are written in float32 and added up in order. rounded: the format that rows are
    rounded to and multiplied in, without splits. inputs: for a tile of `few_rows`, the inputs that are read at a time.
    """

    outputs: int
    rows: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    rounded: Literal["int8", "fp8"] | None = None
    inputs: int | None = None

    def __str__(self) -> str:
        """Return a name that no other tile has."""
        kind, parts = (
            (f"{self.rounded} " if self.rounded else ""),
            (f" in {self.splits} parts" if self.splits > 1 else f" of {self.inputs}" if self.inputs else ""),
        )
        return f"{kind}{self.outputs}x{self.rows}{parts}, {self.num_warps} warps, {self.num_stages} stages"


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockedWeight:
    """integers: uint8 (two 4-bit numbers), int8 or float8_e4m3fn, [blocks, out, bytes].

    scale: floating point, [groups, out].

    zero_point: of 4 bits, less 8: uint8 [groups, out / 2], the even output in the low half. minimum: [groups, out].
    w = (q - zero_point) * scale, or with minima w = (q + 8 with 4 bits, else q) * scale - minimum.
    in_features: inputs; the last block may have fewer. divisor: float32 [1], by which all scales are divided.
    """

    integers: Tensor
    scale: Tensor
    in_features: int
    layout: Layout
    zero_point: Tensor | None = None
    minimum: Tensor | None = None
    divisor: Tensor | None = None

    @property
    def bits(self) -> int:
        return self.layout.bits

    @property
    def is_fp8(self) -> bool:
        return self.layout.format == "fp8"

    @property
    def readable(self) -> Tensor:
        """The integers in the form that programs read: FP8 as bytes."""
        return self.integers.view(torch.uint8) if self.is_fp8 else self.integers

    @property
    def is_stacked(self) -> bool:
        """True if it holds the weights of several experts."""
        return self.integers.dim() == 4

    @property
    def block(self) -> int:
        """The number of inputs in a block."""
        return self.integers.shape[-1] * 8 // self.bits

    @property
    def num_blocks(self) -> int:
        return self.integers.shape[-3]

    @property
    def out_features(self) -> int:
        return self.integers.shape[-2]

    @property
    def blocks_per_group(self) -> int:
        """The number of blocks in a group, 1 also where each half of a block is one; 0 if scales belong to outputs."""
        return 0 if self.layout.group_size is None else max(1, self.layout.group_size // self.block)

    @property
    def is_halved(self) -> bool:
        """True if each half of a block is a group."""
        return self.layout.group_size is not None and self.layout.group_size < self.block

    @property
    def blocks_rounded(self) -> int:
        """The number of blocks in which a row's numbers share a scale when they are rounded."""
        return self.blocks_per_group or ACTIVATION_GROUP // self.block

    @property
    def operands(self) -> dict[str, Any]:
        """The arguments by which a program reads the weight."""
        return {
            "integers": self.readable, "scale": self.scale, "zero_point": self.zero_point, "minimum": self.minimum,
            "divisor": self.divisor, "outputs": self.out_features, "inputs": self.in_features,
            "blocks": self.num_blocks,
        }  # fmt: skip

    @property
    def constants(self) -> dict[str, Any]:
        """The constants by which a program reads the weight."""
        return {
            "BITS": self.bits, "NUMBERS": "fp4" if self.layout.is_float4 else self.layout.format,
            "BLOCK": self.block, "PER_GROUP": self.blocks_per_group, "IS_HALVED": self.is_halved,
        }  # fmt: skip
