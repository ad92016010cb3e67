"""The interface of every stored weight, and the arithmetic of scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ...config import GROUP_SIZES, Format, Layout
from ...errors import UnsupportedError

CHUNK = 256  # outputs dequantized at a time, so that the float copy stays small and in cache


class QuantizedWeight(ABC):
    """A weight [out, in], stored as its layout says.

    The fields of a subclass are the tensors of a checkpoint, by name.

    weight_minimum has the groups of the scales. With input_order, column i of the stored weight belongs to input
    input_order[i].
    """

    bits: ClassVar[int]
    format: ClassVar[Format]
    only: ClassVar[Layout | None] = None  # the one layout that a format has; None: there are several
    kept: ClassVar[tuple[str, ...]] = ()  # floats that do not follow the dtype of the model, besides FP8
    weight_scale: Tensor
    weight_minimum: Tensor | None
    input_order: Tensor | None

    @classmethod
    @abstractmethod
    def empty(
        cls, layout: Layout, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device | str
    ) -> QuantizedWeight:
        """A weight [out, in] of zeros. dtype: of the scales, if the layout does not say it."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""

    @property
    @abstractmethod
    def symmetric(self) -> bool:
        """True if the level 0 stands for the weight 0."""

    def changed(self, **tensors: Tensor | None) -> Self:
        """Return a copy with other tensors, by the names of fields."""
        made: Self = replace(self, **tensors)  # type: ignore[type-var]  # every subclass is a dataclass
        return made

    @property
    def group_size(self) -> int:
        """Inputs that share a scale: all of them, if scales belong to outputs."""
        return self.shape[1] // self.weight_scale.shape[1]

    @property
    def layout(self) -> Layout:
        by_output = self.bits == 8 and self.weight_scale.shape[1] == 1 and self.weight_minimum is None
        return Layout(
            bits=self.bits,
            format=self.format,
            group_size=None if by_output else self.group_size,
            symmetric=self.symmetric,
            minima=self.weight_minimum is not None,
            ordered=self.input_order is not None,
            scale_dtype=self.weight_scale.dtype,
        )

    @abstractmethod
    def integers(self, outputs: slice = slice(None)) -> Tensor:
        """Return the stored numbers, [outputs, in]: integers, or floats in FP8. Zero points are not subtracted."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype, *, outputs: slice = slice(None)) -> Tensor:
        """Return the weight in floating point, [outputs, in], rounded once."""

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return some outputs in floating point, [n, in]. outputs: int64 [n]. Raises IndexError for others."""
        return self.dequantize(dtype).index_select(0, outputs)

    def not_a_number(self) -> tuple[str, list[int]] | None:
        """Find a value that no file may hold, and that kernels would read as a number: its tensor, and its place
        there.
        """
        return None

    @abstractmethod
    def part(self, outputs: slice) -> Self:
        """Return some outputs, without an order of the inputs. All tensors but zero points may be views."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Join weights of one layout, one after the other; the inverse of `part`."""


def joined_minima(parts: Sequence[QuantizedWeight]) -> Tensor | None:
    minima = [part.weight_minimum for part in parts if part.weight_minimum is not None]
    return torch.cat(minima) if minima else None


def in_order(weight: Tensor, input_order: Tensor | None) -> Tensor:
    """Put stored columns [outputs, in] in the order of the layer's inputs."""
    if input_order is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, input_order.to(weight.device, torch.long), weight)


def with_minimum(integers: Tensor, scale: Tensor, minimum: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return integers * scale - minimum in `dtype`: product and difference are rounded once each in float32."""
    if minimum is None:
        return scaled(integers, scale, dtype)
    wide = torch.promote_types(torch.float32, torch.promote_types(scale.dtype, dtype))
    return scaled(integers, scale, wide).sub_(minimum.to(wide)).to(dtype)


def scaled(integers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return integers * scale in `dtype`; a model's dtypes hold integers and FP8 exactly, so it is rounded once."""
    wide = torch.promote_types(scale.dtype, dtype)
    return integers.to(wide).mul_(scale.to(wide)).to(dtype)


def chunks(out_features: int) -> Iterator[slice]:
    """Iterate over ranges of outputs, in order."""
    return (slice(start, start + CHUNK) for start in range(0, out_features, CHUNK))


def check_group_size(shape: tuple[int, int], group_size: int) -> int:
    """Return the number of groups in a row of a weight [out, in].

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
