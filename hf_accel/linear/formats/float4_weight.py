"""MXFP4: 4-bit floats (E2M1) in groups of 32 inputs, whose scales are powers of two (E8M0).

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3.3 and 5.4.1; the layout of the checkpoints of
gpt-oss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ...config import Format, Layout
from .quantized_weight import QuantizedWeight, chunks, in_order, scaled

DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes of E2M1, in the order of their codes
SIGN = 8  # of a code
NOT_A_NUMBER = 255  # of E8M0
MXFP4 = Layout(bits=4, format="mxfp4", group_size=32, scale_dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Float4Weight(QuantizedWeight):
    """Codes of E2M1 and exponents: w = number * 2^(exponent - 127)."""

    bits: ClassVar[int] = 4
    format: ClassVar[Format] = "mxfp4"
    only = MXFP4
    weight_packed: Tensor  # uint8 [out, in / 2], the first of two inputs in the low half
    weight_scale: Tensor  # uint8 [out, in / 32]
    weight_minimum = None
    input_order: Tensor | None = None  # int32 [in], a permutation

    @classmethod
    def empty(cls, layout: Layout, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device | str) -> Self:
        packed = torch.zeros(shape[0], shape[1] // 2, dtype=torch.uint8, device=device)
        order = torch.arange(shape[1], dtype=torch.int32, device=device) if layout.ordered else None
        return cls(packed, torch.zeros(shape[0], layout.groups(shape[1]), dtype=torch.uint8, device=device), order)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight_packed.shape[0], 2 * self.weight_packed.shape[1]

    @property
    def symmetric(self) -> bool:
        return True

    def codes(self, outputs: slice = slice(None)) -> Tensor:
        """uint8 [outputs, in], from 0 to 15; 8 and more are negative."""
        stored = self.weight_packed[outputs]
        return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)

    def integers(self, outputs: slice = slice(None)) -> Tensor:
        """Twice the numbers, int8 [outputs, in] from -12 to 12."""
        levels = torch.tensor((*DOUBLED, *(-level for level in DOUBLED)), dtype=torch.int8)
        return levels.to(self.weight_packed.device)[self.codes(outputs).int()]

    def factors(self, outputs: slice = slice(None)) -> Tensor:
        """The factors of `integers`, float32 [outputs, in / 32]: half of the scales, exactly."""
        exponents = self.weight_scale[outputs].int() - 128
        return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)

    @classmethod
    def of_factors(cls, packed: Tensor, factors: Tensor) -> Self:
        """The weight with these `factors`, in any floating dtype."""
        return cls(packed, (torch.frexp(factors.float()).exponent + 127).to(torch.uint8))

    def dequantize(self, dtype: torch.dtype, *, outputs: slice = slice(None)) -> Tensor:
        factors = self.factors(outputs).unsqueeze(-1)  # [outputs, groups, 1]
        groups = self.integers(outputs).view(*factors.shape[:2], self.group_size)
        return in_order(scaled(groups, factors, dtype).flatten(-2), self.input_order)

    def not_a_number(self) -> tuple[str, list[int]] | None:
        for outputs in chunks(len(self.weight_scale)):
            wrong = self.weight_scale[outputs] == NOT_A_NUMBER
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                return "weight_scale", [outputs.start + row, column]
        return None

    def part(self, outputs: slice) -> Self:
        return type(self)(self.weight_packed[outputs], self.weight_scale[outputs])

    @classmethod
    def joined(cls, parts: Sequence[QuantizedWeight]) -> Self:
        packed = [part.weight_packed for part in parts if isinstance(part, cls)]
        return cls(torch.cat(packed), torch.cat([part.weight_scale for part in parts]))
