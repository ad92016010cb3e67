"""How quantized weights are stored: the compressed-tensors layouts, and nothing else knows their bits.

Source: compressed-tensors `int-quantized` (int8), `pack-quantized` (int4; 3 and 2 bits are packed as GPTQ does) and
`float-quantized` (fp8).
Scales of groups for 8 bits, minima and an order of the inputs are for weights that other programs quantized.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import GROUP_SIZES, Activations
from ..errors import UnsupportedError

CHUNK = 256  # outputs dequantized at a time, so that the float copy stays small and in cache
WORD = 32  # bits of an int32; as many integers of b bits take b words
FLOAT8 = torch.float8_e4m3fn
Format = Literal["int", "fp8"]


@dataclass(frozen=True, eq=False)
class ByteWeight:
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

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def group_size(self) -> int:
        """Inputs that share a scale: all of them, if scales belong to outputs."""
        return self.weight.shape[1] // self.weight_scale.shape[1]

    @property
    def symmetric(self) -> bool:
        return self.weight_minimum is None

    @property
    def by_group(self) -> bool:
        return self.weight_scale.shape[1] > 1 or self.weight_minimum is not None

    def integers(self, outputs: slice = slice(None)) -> Tensor:
        """The numbers as they are stored, [outputs, in]: whole ones, but for FP8."""
        return self.weight[outputs]

    def dequantize(self, dtype: torch.dtype, *, outputs: slice = slice(None)) -> Tensor:
        """The weight in floating point, [outputs, in], rounded once."""
        scale = self.weight_scale[outputs].unsqueeze(-1)  # [outputs, groups, 1]
        groups = self.weight[outputs].view(*scale.shape[:2], self.group_size)
        minimum = None if self.weight_minimum is None else self.weight_minimum[outputs].unsqueeze(-1)
        return in_order(lowered(groups, scale, minimum, dtype).flatten(-2), self.input_order)


class Int8Weight(ByteWeight):
    """INT8: -127..127; -128 where another program made it."""

    format = "int"
    stored_as = torch.int8


class Float8Weight(ByteWeight):
    """FP8 (e4m3): -448..448, with three bits after the first and an exponent; no minima."""

    format = "fp8"
    stored_as = FLOAT8


@dataclass(frozen=True, eq=False)
class LowBitWeight:
    """Packed integers, one scale and maybe one zero point per output and group: w = (q - zero_point) * scale.

    Symmetric without zero points: w = q * scale. q + 2^(bits - 1) is stored. Outputs in weight_zero_point are padded
    to whole words with 0. With minima, which leave no zero points: w = (q + 2^(bits - 1)) * scale - minimum.
    input_order as in Int8Weight.
    """

    bits: ClassVar[int]
    format: ClassVar[Format] = "int"
    by_group: ClassVar[bool] = True
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
        return cls(_to_words(integers, cls.bits), scale, shape, zeros)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.weight_packed.shape[0], self.weight_packed.shape[1] * WORD // self.bits

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.weight_scale.shape[1]

    @property
    def symmetric(self) -> bool:
        return self.weight_zero_point is None and self.weight_minimum is None

    def integers(self, outputs: slice = slice(None)) -> Tensor:
        """q, int8 [outputs, in], as stored: zero points are not taken off."""
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
        """The weight in floating point, [outputs, in], rounded once."""
        scale = self.weight_scale[outputs].unsqueeze(-1)  # [outputs, groups, 1]
        groups = self.integers(outputs).view(*scale.shape[:2], self.group_size)
        zero_point = self.zero_points(outputs)
        if zero_point is not None:
            groups -= zero_point.unsqueeze(-1)  # -15..15
        minimum = None if self.weight_minimum is None else self.weight_minimum[outputs].unsqueeze(-1)
        groups = groups if minimum is None else groups.add_(1 << self.bits - 1)
        return in_order(lowered(groups, scale, minimum, dtype).flatten(-2), self.input_order)


class Int4Weight(LowBitWeight):
    """INT4: -8..7."""

    bits = 4


class Int3Weight(LowBitWeight):
    """INT3: -4..3."""

    bits = 3


class Int2Weight(LowBitWeight):
    """INT2: -2..1."""

    bits = 2


def unit_of(bits: int) -> tuple[int, int]:
    """The fewest integers that fill whole words, and those words."""
    words = bits // math.gcd(bits, WORD)
    return WORD * words // bits, words


def pack_zero_points(zero_point: Tensor, bits: int = 4) -> Tensor:
    """int8 [out, groups], less 2^(bits - 1) -> int32 [words of out, groups]."""
    padded = F.pad(zero_point, (0, 0, 0, -len(zero_point) % unit_of(bits)[0]), value=-(1 << bits - 1))
    return _to_words(padded.t().contiguous(), bits).t().contiguous()


def _to_words(integers: Tensor, bits: int) -> Tensor:
    """int8 [rows, n], less 2^(bits - 1) -> int32 [rows, n * bits / 32], the first integer in the lowest bits."""
    rows, columns = integers.shape
    unsigned = (integers + (1 << bits - 1)).view(torch.uint8)
    if bits == 4:
        stored = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    else:
        single = unsigned.unsqueeze(-1) >> _places(bits, integers.device) & 1
        stored = (single.view(rows, -1, 8) << _places(8, integers.device)).sum(-1, dtype=torch.uint8)
    return stored.flatten().view(torch.int32).view(rows, columns * bits // WORD)  # one row may have any stride


def unpack_words(words: Tensor, bits: int = 4) -> Tensor:
    """int32 [rows, n * bits / 32] -> int8 [rows, n]: each `bits` bits less 2^(bits - 1), the lowest first."""
    rows, columns = words.shape
    stored = words.flatten().view(torch.uint8)
    if bits == 4:
        unsigned = torch.stack((stored & 15, stored >> 4), dim=-1)
    else:
        single = stored.unsqueeze(-1) >> _places(8, words.device) & 1
        unsigned = (single.view(-1, bits) << _places(bits, words.device)).sum(-1, dtype=torch.uint8)
    return unsigned.view(torch.int8).sub_(1 << bits - 1).view(rows, columns * WORD // bits)


def _places(bits: int, device: torch.device) -> Tensor:
    return torch.arange(bits, dtype=torch.uint8, device=device)


QuantizedWeight = ByteWeight | LowBitWeight
BYTES: dict[Format, type[ByteWeight]] = {each.format: each for each in (Int8Weight, Float8Weight)}
LOW_BITS: dict[int, type[LowBitWeight]] = {each.bits: each for each in (Int4Weight, Int3Weight, Int2Weight)}
FORMATS: dict[int, type[ByteWeight] | type[LowBitWeight]] = {8: Int8Weight, **LOW_BITS}  # of integers, by bits


def state(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by name; no weight_zero_point for a symmetric weight."""
    tensors = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def converts(tensor: Tensor) -> bool:
    """Whether a tensor of `state` follows the dtype of the model: scales and minima do, the numbers do not."""
    return tensor.is_floating_point() and tensor.dtype is not FLOAT8


def readable(tensor: Tensor) -> Tensor:
    """FP8 as bytes: most of torch's operators, and GPUs before sm_89, do not know it."""
    return tensor.view(torch.uint8) if tensor.dtype is FLOAT8 else tensor


def from_state(bits: int, tensors: Mapping[str, Tensor], *, format: Format = "int") -> QuantizedWeight:
    """The weight of `bits` whose `state` is among `tensors`."""
    kind = Float8Weight if format == "fp8" else FORMATS[bits]
    names = [f.name for f in fields(kind) if f.default is MISSING or f.name in tensors]
    return kind(**{name: tensors[name] for name in names})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What of a quantized weight its shape does not say.

    group_size: inputs that share a scale; None, for 8 bits only: a scale for each output. minima: in the place of zero
    points. ordered: whether the inputs have an order of their own.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True
    minima: bool = False
    ordered: bool = False
    format: Format = "int"

    @property
    def label(self) -> str:
        """As users name it, such as int8 or fp8."""
        return f"int{self.bits}" if self.format == "int" else self.format

    @classmethod
    def of(cls, weight: QuantizedWeight) -> Layout:
        return cls(
            bits=weight.bits,
            group_size=weight.group_size if weight.by_group else None,
            symmetric=weight.symmetric,
            minima=weight.weight_minimum is not None,
            ordered=weight.input_order is not None,
            format=weight.format,
        )


def settings_of(layout: Layout, *, activations: Activations, scale_dtype: torch.dtype | None) -> dict[str, Any]:
    """What config.json says of a layer. scale_dtype: of its scales, None if that is the model's."""
    settings: dict[str, Any] = {"bits": layout.bits, "activations": activations}
    if layout.format != "int":
        settings["format"] = layout.format
    if layout.group_size is not None:
        settings["group_size"] = layout.group_size
    if layout.bits != 8:
        settings["symmetric"] = layout.symmetric and not layout.minima
    settings |= {name: True for name in ("minima", "ordered") if getattr(layout, name)}
    return settings | ({} if scale_dtype is None else {"scale_dtype": str(scale_dtype).removeprefix("torch.")})


def zeros(
    layout: Layout, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device | str
) -> QuantizedWeight:
    """A weight [out, in] of zeros. dtype: of the scales."""
    groups = 1 if layout.group_size is None else check_group_size(shape, layout.group_size)
    scale = torch.zeros(shape[0], groups, dtype=dtype, device=device)
    order = torch.arange(shape[1], dtype=torch.int32, device=device) if layout.ordered else None
    minimum = torch.zeros_like(scale) if layout.minima else None
    if layout.bits == 8:
        kind = BYTES[layout.format]
        return kind(torch.zeros(shape, dtype=kind.stored_as, device=device), scale, order, minimum)
    integers = torch.zeros(shape, dtype=torch.int8, device=device)
    zero_point = None if layout.symmetric or layout.minima else torch.zeros_like(scale, dtype=torch.int8)
    weight = LOW_BITS[layout.bits].from_integers(integers, scale, zero_point)
    return replace(weight, weight_minimum=minimum, input_order=order)


def in_order(weight: Tensor, input_order: Tensor | None) -> Tensor:
    """Stored columns [outputs, in] in the order of the layer's inputs."""
    if input_order is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, input_order.to(weight.device, torch.long), weight)


def zero_point_bytes(out_features: int, groups: int, bits: int = 4) -> int:
    """Bytes of a stored weight_zero_point."""
    whole, words = unit_of(bits)
    return -(-out_features // whole) * words * groups * 4


def lowered(integers: Tensor, scale: Tensor, minimum: Tensor | None, dtype: torch.dtype) -> Tensor:
    """integers * scale - minimum in `dtype`: the product, and the difference, are rounded once each in float32."""
    if minimum is None:
        return scaled(integers, scale, dtype)
    wide = torch.promote_types(torch.float32, torch.promote_types(scale.dtype, dtype))
    return scaled(integers, scale, wide).sub_(minimum.to(wide)).to(dtype)


def scaled(integers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """integers * scale in `dtype`; every dtype of a model holds integers and FP8 exactly, so one rounding is left."""
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
