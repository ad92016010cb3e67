"""How quantized weights are stored: the compressed-tensors layouts, and nothing else knows their bits.

Source: compressed-tensors `int-quantized` (int8) and `pack-quantized` (int4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from ..config import GROUP_SIZES
from ..errors import UnsupportedError

CHUNK = 256  # outputs dequantized at a time, so that the float copy stays small and in cache
NIBBLES = 8  # 4-bit integers in an int32 word


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """Symmetric INT8, one scale per output channel: w = q * scale."""

    bits: ClassVar[int] = 8
    weight: Tensor  # int8 [out, in], -127..127
    weight_scale: Tensor  # [out, 1], the model's dtype

    @classmethod
    def from_integers(cls, integers: Tensor, scale: Tensor) -> Int8Weight:
        return cls(integers, scale)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def group_size(self) -> int:
        return self.weight.shape[1]

    def integers(self, outputs: slice = slice(None)) -> Tensor:
        """int8 [outputs, in]."""
        return self.weight[outputs]

    def dequantize(self, dtype: torch.dtype, *, outputs: slice = slice(None)) -> Tensor:
        """The weight in floating point, [outputs, in], rounded once."""
        return scaled(self.weight[outputs], self.weight_scale[outputs], dtype)


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """Symmetric INT4, one scale per output and group of inputs: w = q * scale."""

    bits: ClassVar[int] = 4
    weight_packed: Tensor  # int32 [out, in / 8], q + 8, the first input in the lowest bits
    weight_scale: Tensor  # [out, in / group], the model's dtype
    weight_shape: Tensor  # int64 [2]: out, in

    @classmethod
    def from_integers(cls, integers: Tensor, scale: Tensor) -> Int4Weight:
        """Pack int8 [out, in] of -8..7."""
        unsigned = (integers + 8).view(torch.uint8)
        packed = (unsigned[:, ::2] | unsigned[:, 1::2] << 4).view(torch.int32)
        return cls(packed, scale, torch.tensor(integers.shape, device=integers.device))

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.weight_packed.shape[0], self.weight_packed.shape[1] * NIBBLES

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.weight_scale.shape[1]

    def integers(self, outputs: slice = slice(None)) -> Tensor:
        """int8 [outputs, in], -8..7."""
        pairs = self.weight_packed[outputs].view(torch.uint8)
        unsigned = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
        return unsigned.view(torch.int8).sub_(8)

    def dequantize(self, dtype: torch.dtype, *, outputs: slice = slice(None)) -> Tensor:
        """The weight in floating point, [outputs, in], rounded once."""
        scale = self.weight_scale[outputs].unsqueeze(-1)  # [outputs, groups, 1]
        groups = self.integers(outputs).view(*scale.shape[:2], self.group_size)
        return scaled(groups, scale, dtype).flatten(-2)


QuantizedWeight = Int8Weight | Int4Weight
FORMATS: dict[int, type[Int8Weight] | type[Int4Weight]] = {8: Int8Weight, 4: Int4Weight}


def state(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by name."""
    return {field.name: getattr(weight, field.name) for field in fields(weight)}


def from_state(bits: int, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """The weight of `bits` whose `state` is among `tensors`."""
    return FORMATS[bits](**{field.name: tensors[field.name] for field in fields(FORMATS[bits])})


def zeros(
    bits: int, shape: tuple[int, int], group_size: int, *, dtype: torch.dtype, device: torch.device | str
) -> QuantizedWeight:
    """A weight [out, in] of zeros; group_size is read for 4 bits only."""
    groups = 1 if bits == 8 else check_group_size(shape, group_size)
    scale = torch.zeros(shape[0], groups, dtype=dtype, device=device)
    return FORMATS[bits].from_integers(torch.zeros(shape, dtype=torch.int8, device=device), scale)


def scaled(integers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """integers * scale in `dtype`; every dtype of a model holds the integers exactly, so one rounding is left."""
    wide = torch.promote_types(scale.dtype, dtype)
    return integers.to(wide).mul_(scale.to(wide)).to(dtype)


def chunks(out_features: int) -> Iterator[slice]:
    """Ranges of outputs, in order."""
    return (slice(start, start + CHUNK) for start in range(0, out_features, CHUNK))


def check_group_size(shape: tuple[int, int], group_size: int) -> int:
    """The number of groups in a row of a weight [out, in].

    Raises UnsupportedError unless the inputs divide into groups.
    """
    if shape[1] % group_size:
        fitting = [size for size in GROUP_SIZES if shape[1] % size == 0]
        way_out = f"use group_size={fitting[-1]}" if fitting else "use bits=8 for it, or skip it"
        raise UnsupportedError(
            f"group_size={group_size} does not divide the {shape[1]} inputs of a weight "
            f"[{shape[0]}, {shape[1]}]; {way_out}"
        )
    return shape[1] // group_size
