"""Integers of 4, 3 and 2 bits in groups: `pack-quantized` of compressed-tensors; 3 and 2 bits as GPTQ packs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ...config import Format, Layout
from .quantized_weight import QuantizedWeight, in_order, joined_minima, with_minimum
from .words import WORD, pack_zero_points, to_words, unit_of, unpack_words


@dataclass(frozen=True, eq=False)
class LowBitWeight(QuantizedWeight):
    """Packed integers, one scale and maybe one zero point per output and group: w = (q - zero_point) * scale.

    Symmetric without zero points: w = q * scale. q + 2^(bits - 1) is stored. Outputs in weight_zero_point are padded
    to whole words with 0. With minima, which leave no zero points: w = (q + 2^(bits - 1)) * scale - minimum.
    input_order as in Int8Weight.
    """

    bits: ClassVar[int]
    format: ClassVar[Format] = "int"
    weight_packed: Tensor  # int32 [out, in * bits / 32], the first input in the lowest bits
    weight_scale: Tensor  # [out, in / group], floating point
    weight_shape: Tensor  # int64 [2]: out, in
    weight_zero_point: Tensor | None = None  # int32 [words of out, in / group], the first output lowest
    weight_minimum: Tensor | None = None  # [out, in / group], the scales' dtype
    input_order: Tensor | None = None  # int32 [in], a permutation

    @classmethod
    def from_integers(cls, integers: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Self:
        """Pack int8 [out, in] and int8 [out, in / group], each of -2^(bits - 1)..2^(bits - 1) - 1."""
        shape = torch.tensor(integers.shape, device=integers.device)
        zeros = None if zero_point is None else pack_zero_points(zero_point, cls.bits)
        return cls(to_words(integers, cls.bits), scale, shape, zeros)

    @classmethod
    def empty(cls, layout: Layout, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device | str) -> Self:
        scale = torch.zeros(shape[0], layout.groups(shape[1]), dtype=layout.scale_dtype or dtype, device=device)
        has_zeros = not (layout.symmetric or layout.minima)
        zero_point = torch.zeros_like(scale, dtype=torch.int8) if has_zeros else None
        weight = cls.from_integers(torch.zeros(shape, dtype=torch.int8, device=device), scale, zero_point)
        return replace(
            weight, weight_minimum=torch.zeros_like(scale) if layout.minima else None,
            input_order=torch.arange(shape[1], dtype=torch.int32, device=device) if layout.ordered else None,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight_packed.shape[0], self.weight_packed.shape[1] * WORD // self.bits

    @property
    def symmetric(self) -> bool:
        return self.weight_zero_point is None and self.weight_minimum is None

    def integers(self, outputs: slice = slice(None)) -> Tensor:
        return unpack_words(self.weight_packed[outputs], self.bits)

    def zero_points(self, outputs: slice = slice(None)) -> Tensor | None:
        """int8 [outputs, in / group], less 2^(bits - 1) as the integers are; None if symmetric."""
        if self.weight_zero_point is None:
            return None
        wanted = range(self.shape[0])[outputs]  # slice.indices is unknown to older torch.compile
        whole, words = unit_of(self.bits)
        first = wanted.start // whole
        stored = self.weight_zero_point[first * words : -(-wanted.stop // whole) * words]
        found = unpack_words(stored.t().contiguous(), self.bits).t()
        first *= whole
        return found[wanted.start - first : wanted.stop - first : wanted.step].contiguous()

    def dequantize(self, dtype: torch.dtype, *, outputs: slice = slice(None)) -> Tensor:
        scale = self.weight_scale[outputs].unsqueeze(-1)  # [outputs, groups, 1]
        groups = self.integers(outputs).view(*scale.shape[:2], self.group_size)
        zero_point = self.zero_points(outputs)
        if zero_point is not None:
            groups -= zero_point.unsqueeze(-1)  # -15..15
        minimum = None if self.weight_minimum is None else self.weight_minimum[outputs].unsqueeze(-1)
        groups = groups if minimum is None else groups.add_(1 << self.bits - 1)
        return in_order(with_minimum(groups, scale, minimum, dtype).flatten(-2), self.input_order)

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        zero_point, minimum = self.zero_points(), self.weight_minimum
        found = self.changed(
            weight_packed=self.weight_packed.index_select(0, outputs),
            weight_scale=self.weight_scale.index_select(0, outputs),
            weight_zero_point=None if zero_point is None else pack_zero_points(zero_point[outputs], self.bits),
            weight_minimum=None if minimum is None else minimum.index_select(0, outputs),
        )
        return found.dequantize(dtype)

    def part(self, outputs: slice) -> Self:
        made = self.from_integers(self.integers(outputs), self.weight_scale[outputs], self.zero_points(outputs))
        return made if self.weight_minimum is None else replace(made, weight_minimum=self.weight_minimum[outputs])

    @classmethod
    def joined(cls, parts: Sequence[QuantizedWeight]) -> Self:
        integers = torch.cat([part.integers() for part in parts])
        zeros = [zero for part in parts if isinstance(part, cls) and (zero := part.zero_points()) is not None]
        scale = torch.cat([part.weight_scale for part in parts])
        weight = cls.from_integers(integers, scale, torch.cat(zeros) if zeros else None)
        return replace(weight, weight_minimum=joined_minima(parts))


class Int4Weight(LowBitWeight):
    """INT4: -8..7."""

    bits = 4


class Int3Weight(LowBitWeight):
    """INT3: -4..3."""

    bits = 3


class Int2Weight(LowBitWeight):
    """INT2: -2..1."""

    bits = 2
