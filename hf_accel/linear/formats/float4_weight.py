"""Weights of 4-bit floats (E2M1) in groups of inputs, and MXFP4, whose scales are powers of two (E8M0).

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3.3 and 5.4.1; the layout of the checkpoints of
gpt-oss.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ...config import Format, Layout
from .quantized_weight import QuantizedWeight, chunks, in_order, scaled

DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes of E2M1, in the order of their codes
MIDDLES = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # between them
MXFP4 = Layout(bits=4, format="mxfp4", group_size=32, scale_dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Float4Weight(QuantizedWeight):
    """Codes of E2M1, and a scale for each output and group of inputs.

    not_numbers: the bytes of a scale that stand for no number.
    """

    bits: ClassVar[int] = 4
    not_numbers: ClassVar[tuple[int, ...]]
    weight_packed: Tensor  # uint8 [out, in / 2], the first of two inputs in the low half
    weight_scale: Tensor  # [out, in / group], a byte each
    weight_minimum = None

    @classmethod
    def empty(
        cls, layout: Layout, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device | str, **more: Any
    ) -> Self:
        packed = torch.zeros(shape[0], shape[1] // 2, dtype=torch.uint8, device=device)
        scale = torch.zeros(shape[0], layout.groups(shape[1]), dtype=layout.scale_dtype, device=device)
        order = torch.arange(shape[1], dtype=torch.int32, device=device) if layout.ordered else None
        tensors: dict[str, Any] = {"input_order": order, **more}
        return cls(packed, scale, **tensors)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight_packed.shape[0], 2 * self.weight_packed.shape[1]

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def divisor(self) -> Tensor | None:
        """The number by which all scales are divided, float32 [1]; None if there is none."""
        return None

    def codes(self, outputs: slice = slice(None)) -> Tensor:
        """uint8 [outputs, in], from 0 to 15; 8 and more are negative."""
        stored = self.weight_packed[outputs]
        return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)

    def integers(self, outputs: slice = slice(None)) -> Tensor:
        """Twice the numbers, int8 [outputs, in] from -12 to 12."""
        levels = torch.tensor((*DOUBLED, *(-level for level in DOUBLED)), dtype=torch.int8)
        return levels.to(self.weight_packed.device)[self.codes(outputs).int()]

    @abstractmethod
    def factors(self, outputs: slice = slice(None)) -> Tensor:
        """Return the factors of `integers`, float32 [outputs, in / group]: half of the scales, exactly, also in
        bfloat16.
        """

    @classmethod
    @abstractmethod
    def of_factors(cls, packed: Tensor, factors: Tensor, divisor: Tensor | None) -> Self:
        """Return the weight with these `factors`, in any floating dtype that holds them, and this divisor."""

    @abstractmethod
    def for_largest(self, largest: Tensor) -> Self:
        """Return a copy with scales for groups whose largest magnitudes are these, float32 [out, groups]."""

    def rounded(self, weight: Tensor) -> Self:
        """Round a finite float weight [out, in] to nearest, with scales of its own."""
        groups = weight.float().reshape(len(weight), -1, self.group_size)
        made = self.for_largest(groups.abs().amax(-1))
        steps = made._divided(made.factors()).unsqueeze(-1)
        levels = (groups / steps.masked_fill(steps == 0, 1)).flatten(1)
        codes = torch.bucketize(levels.abs(), torch.tensor(MIDDLES, device=levels.device)) + 8 * (levels < 0)
        codes = codes.to(torch.uint8)
        return made.changed(weight_packed=codes[:, ::2] | codes[:, 1::2] << 4)

    def _divided(self, factors: Tensor) -> Tensor:
        return factors if self.divisor is None else factors / self.divisor

    def dequantize(self, dtype: torch.dtype, *, outputs: slice = slice(None)) -> Tensor:
        factors = self._divided(self.factors(outputs)).unsqueeze(-1)  # [outputs, groups, 1]
        groups = self.integers(outputs).view(*factors.shape[:2], self.group_size)
        return in_order(scaled(groups, factors, dtype).flatten(-2), self.input_order)

    def not_a_number(self) -> tuple[str, list[int]] | None:
        for outputs in chunks(len(self.weight_scale)):
            stored = self.weight_scale[outputs].view(torch.uint8)
            wrong = torch.isin(stored, torch.tensor(self.not_numbers, dtype=torch.uint8, device=stored.device))
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                return "weight_scale", [outputs.start + row, column]
        return None

    def part(self, outputs: slice) -> Self:
        packed, scale = self.weight_packed[outputs], self.weight_scale[outputs]
        return self.changed(weight_packed=packed, weight_scale=scale, input_order=None)

    @classmethod
    def joined(cls, parts: Sequence[QuantizedWeight]) -> Self:
        weights = [part for part in parts if isinstance(part, cls)]
        return weights[0].changed(
            weight_packed=torch.cat([weight.weight_packed for weight in weights]),
            weight_scale=torch.cat([weight.weight_scale for weight in weights]),
        )


@dataclass(frozen=True, eq=False)
class Mxfp4Weight(Float4Weight):
    """MXFP4: w = number * 2^(exponent - 127), with exponents in weight_scale, uint8."""

    format: ClassVar[Format] = "mxfp4"
    only = MXFP4
    not_numbers = (255,)
    input_order: Tensor | None = None  # int32 [in], a permutation

    def factors(self, outputs: slice = slice(None)) -> Tensor:
        exponents = self.weight_scale[outputs].int() - 128
        return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)

    def for_largest(self, largest: Tensor) -> Self:
        exponents = torch.frexp(largest).exponent + 124  # the largest power of two in E2M1 is 4
        return self.changed(weight_scale=exponents.clamp(0, 254).to(torch.uint8))

    @classmethod
    def of_factors(cls, packed: Tensor, factors: Tensor, divisor: Tensor | None) -> Self:
        return cls(packed, (torch.frexp(factors.float()).exponent + 127).to(torch.uint8))
