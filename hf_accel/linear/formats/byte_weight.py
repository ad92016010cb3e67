"""A byte for each number: INT8 and FP8, in the layouts `int-quantized` and `float-quantized` of compressed-tensors.

Scales of groups, minima and an order of the inputs are for weights that other programs quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ...config import Format, Layout
from .quantized_weight import QuantizedWeight, chunks, in_order, joined_minima, with_minimum

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class ByteWeight(QuantizedWeight):
    """A byte for each number, one scale per output channel, or per output and group of inputs: w = q * scale.

    With minima, which have the groups of the scales: w = q * scale - minimum. With input_order, column i of the stored
    weight belongs to input input_order[i].
    """

    bits: ClassVar[int] = 8
    format: ClassVar[Format]
    stored_as: ClassVar[torch.dtype]
    weight: Tensor  # [out, in] in `stored_as`
    weight_scale: Tensor  # [out, 1] or [out, in / group], floating point
    input_order: Tensor | None = None  # int32 [in], a permutation
    weight_minimum: Tensor | None = None  # [out, in / group], the scales' dtype

    @classmethod
    def from_integers(cls, integers: Tensor, scale: Tensor) -> Self:
        return cls(integers, scale)

    @classmethod
    def empty(cls, layout: Layout, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device | str) -> Self:
        scale = torch.zeros(shape[0], layout.groups(shape[1]), dtype=layout.scale_dtype or dtype, device=device)
        order = torch.arange(shape[1], dtype=torch.int32, device=device) if layout.ordered else None
        minimum = torch.zeros_like(scale) if layout.minima else None
        return cls(torch.zeros(shape, dtype=cls.stored_as, device=device), scale, order, minimum)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def symmetric(self) -> bool:
        return self.weight_minimum is None

    def integers(self, outputs: slice = slice(None)) -> Tensor:
        return self.weight[outputs]

    def dequantize(self, dtype: torch.dtype, *, outputs: slice = slice(None)) -> Tensor:
        scale = self.weight_scale[outputs].unsqueeze(-1)  # [outputs, groups, 1]
        groups = self.weight[outputs].view(*scale.shape[:2], self.group_size)
        minimum = None if self.weight_minimum is None else self.weight_minimum[outputs].unsqueeze(-1)
        return in_order(with_minimum(groups, scale, minimum, dtype).flatten(-2), self.input_order)

    def part(self, outputs: slice) -> Self:
        minimum = None if self.weight_minimum is None else self.weight_minimum[outputs]
        return type(self)(self.weight[outputs], self.weight_scale[outputs], None, minimum)

    @classmethod
    def joined(cls, parts: Sequence[QuantizedWeight]) -> Self:
        integers = torch.cat([part.integers() for part in parts])
        return cls(integers, torch.cat([part.weight_scale for part in parts]), None, joined_minima(parts))


class Int8Weight(ByteWeight):
    """INT8: -127..127; -128 too if another program made it."""

    format = "int"
    stored_as = torch.int8

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        minimum = None if self.weight_minimum is None else self.weight_minimum.index_select(0, outputs)
        weight, scale = self.weight.index_select(0, outputs), self.weight_scale.index_select(0, outputs)
        return self.changed(weight=weight, weight_scale=scale, weight_minimum=minimum).dequantize(dtype)


class Float8Weight(ByteWeight):
    """FP8 (e4m3): -448..448, with three bits after the first and an exponent; no minima."""

    format = "fp8"
    stored_as = FLOAT8

    def not_a_number(self) -> tuple[str, list[int]] | None:
        for outputs in chunks(len(self.weight)):
            # float8_e4m3fn has two such bytes, and no infinity.
            wrong = (self.weight[outputs].view(torch.uint8) & 0x7F) == 0x7F
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                return "weight", [outputs.start + row, column]
        return None
