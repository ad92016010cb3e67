"""Weights of integers in blocks of 64 outputs, as the CPU kernels read them and as save_pretrained writes them.

A machine without these kernels turns blocks back into the stored form with plain torch. The layout, version 1:

* weight_blocks, 8 bits: a block is [inputs / 4, 64, 4] bytes, a byte is q + 128, inputs are padded to a multiple of 4.
* weight_blocks, 4 bits: a block is [inputs / 8, 64, 4] bytes; of 8 inputs, byte i holds input i in its low half and
  input 4 + i in its high half, each q + 8.
* weight_blocks, 2 bits: a block is [inputs / 16, 64, 4] bytes; of 16 inputs, byte i holds inputs i, 4 + i, 8 + i and
  12 + i, the first in its lowest bits, each q + 2.
* weight_blocks, 3 bits: a block is [inputs / 32, 4, 3, 16, 4] bytes, with three planes of 16 outputs each. Of 32
  inputs, byte i of the planes holds inputs
  4 w + i for w from 0 to 7, each q + 4. The lowest 6 bits of plane p are inputs w = 2 p and, above it, 2 p + 1. The
  2 upper bits of planes 0 and 1 are those of w = 6 and 7, whose lowest bits are bits 6 and 7 of plane 2.
* Factors, with the numbers of the stored form: [blocks, groups, 64]; one group where scales belong to outputs.

The last block of a weight is padded. The blocks of several experts follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from ...config import Layout
from ...errors import UnsupportedError
from . import kind_of
from .byte_weight import Int8Weight
from .quantized_weight import QuantizedWeight
from .words import pack_zero_points

VERSION = 1  # of the layout, as config.json says it of each module
VERSION_SETTING = "blocks"  # its name among the settings of a module
BLOCK = 64  # outputs
ALIGNMENT = 64  # bytes: a line of the cache, which the kernels read at once
UNIT_INPUTS = {8: 1, 4: 8, 3: 32, 2: 16}  # that lie in one piece, by the number of bits; groups are whole pieces


@dataclass(frozen=True, eq=False)
class Blocks:
    """One weight, or those of several experts, in blocks; the fields are the tensors of a checkpoint, by name."""

    weight_blocks: Tensor  # uint8 [blocks, bytes of a block]
    weight_scale: Tensor  # [blocks, groups, 64], floating point
    weight_zeros: Tensor | None = None  # uint8 [blocks, groups, 64], from 0 to 15, the levels that stand for 0
    weight_minimum: Tensor | None = None  # [blocks, groups, 64], the scales' dtype
    input_order: Tensor | None = None  # int32 [in], a permutation

    @classmethod
    def empty(
        cls,
        layout: Layout,
        shape: tuple[int, int],
        *,
        experts: int = 1,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """Blocks of weights [out, in], which nobody has written. dtype: of the scales, if the layout does not say
        it. Raises UnsupportedError for inputs that are no whole units.
        """
        outputs, inputs = shape
        if inputs % UNIT_INPUTS[layout.bits]:
            unit = UNIT_INPUTS[layout.bits]
            raise UnsupportedError(
                f"blocks of {layout.bits} bits hold a multiple of {unit} inputs, not {inputs}; save the model again"
            )
        blocks, groups = experts * -(-outputs // BLOCK), layout.groups(inputs)
        factors = (blocks, groups, BLOCK)
        of_floats = layout.scale_dtype or dtype
        has_zeros = not (layout.symmetric or layout.minima)
        return cls(
            torch.empty(blocks, BLOCK * -(-inputs // 4) * 4 * layout.bits // 8, dtype=torch.uint8, device=device),
            torch.empty(factors, dtype=of_floats, device=device),
            torch.empty(factors, dtype=torch.uint8, device=device) if has_zeros else None,
            torch.empty(factors, dtype=of_floats, device=device) if layout.minima else None,
            torch.empty(inputs, dtype=torch.int32, device=device) if layout.ordered else None,
        )

    @classmethod
    def of_state(cls, tensors: dict[str, Tensor | None]) -> Self:
        """Return the blocks whose `tensors_of` is among these tensors."""
        return cls(**{field.name: tensors[field.name] for field in fields(cls) if field.name in tensors})  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Self:
        """Join weights of one layout and shape, one after the other; the inverse of `parts`."""
        tensors = [tensors_of(part) for part in parts]
        return cls(**{name: torch.cat([part[name] for part in tensors]) for name in tensors[0]})

    def parts(self, count: int) -> list[Blocks]:
        """Split the weights of several experts; all tensors are views."""
        pieces = {name: tensor.chunk(count) for name, tensor in tensors_of(self).items() if name != "input_order"}
        return [Blocks(**{name: piece[index] for name, piece in pieces.items()}) for index in range(count)]

    def stored(self, layout: Layout, shape: tuple[int, int], *, experts: int = 1) -> QuantizedWeight:
        """Return the weights [out, in] of this layout in the stored form, one after the other."""
        made: QuantizedWeight = kind_of(layout).joined([p._stored(layout, shape) for p in self.parts(experts)])
        return made.changed(input_order=self.input_order)

    def _stored(self, layout: Layout, shape: tuple[int, int]) -> QuantizedWeight:
        outputs, inputs = shape
        words = _words(self.weight_blocks.view(len(self.weight_blocks), -1, BLOCK, 4), layout.bits)
        levels = words.transpose(1, 2).reshape(len(words) * BLOCK, -1)[:outputs, :inputs]
        scale = _by_output(self.weight_scale, outputs)
        minimum = None if self.weight_minimum is None else _by_output(self.weight_minimum, outputs)
        if layout.bits == 8:
            return Int8Weight((levels ^ 0x80).contiguous().view(torch.int8), scale, None, minimum)
        half = 1 << layout.bits - 1
        weight: QuantizedWeight = kind_of(layout).from_integers(levels.contiguous().view(torch.int8) - half, scale)
        zeros = None if self.weight_zeros is None else _by_output(self.weight_zeros, outputs).view(torch.int8) - half
        return weight.changed(
            weight_zero_point=None if zeros is None else pack_zero_points(zeros, layout.bits), weight_minimum=minimum
        )


def _words(planes: Tensor, bits: int) -> Tensor:
    """[blocks, planes, 64, 4] -> levels [blocks, units, 64, inputs of a unit], uint8."""
    if bits == 8:
        return planes
    if bits != 3:
        return torch.cat([planes >> place & (1 << bits) - 1 for place in range(0, 8, bits)], dim=-1)
    a, b, c = planes.view(len(planes), -1, BLOCK // 16, 3, 16, 4).transpose(2, 3).flatten(3, 4).unbind(2)
    low = [plane >> place & 7 for plane in (a, b, c) for place in (0, 3)]
    return torch.cat((*low, a >> 5 & 6 | c >> 6 & 1, b >> 5 & 6 | c >> 7), dim=-1)


def tensors_of(blocks: Blocks) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, by name."""
    tensors = {field.name: getattr(blocks, field.name) for field in fields(blocks)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _by_output(factors: Tensor, outputs: int) -> Tensor:
    """Convert [blocks, groups, 64] to [out, groups]."""
    return factors.transpose(1, 2).reshape(-1, factors.shape[1])[:outputs].contiguous()
