"""INT8 and INT4 weights times INT8 activations, packed for the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .library import DTYPES, kernel, large_pages, threads
from .structs import EPILOGUES, Linear, LinearCall, Matrix, fields

BLOCK = 64  # outputs that are packed together
ACTIVATION_GROUP = 128  # inputs that share an activation scale where the weight has no groups of its own
FORMATS = {8: 3, 4: 5}  # bits -> Dtype of types.h


class PackCall(Structure):
    _fields_ = fields(ints="format threads", sizes="out_features in_features", pointers="stored packed")


class QuantizeCall(Structure):
    _fields_ = fields(
        ints="format dtype threads", sizes="out_features in_features group", pointers="weight",
        sizes_="weight_stride", pointers_="scales zeros packed finite",
    )  # fmt: skip


_integer_linear = kernel("integer_linear", LinearCall)
_pack = kernel("pack", PackCall)
_unpack = kernel("unpack", PackCall)
_quantize_weight = kernel("quantize_weight", QuantizeCall)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] in blocks of 64 outputs (the last one padded).

    packed: uint8, laid out as src/kernels.h says. scales: float32 [blocks * 64] for 8 bits; [blocks, groups, 64] in
    the stored dtype for 4 bits. zeros, for 4 bits: uint8 [blocks, groups, 64], 0..15, w = (level - zero) * scale; None
    where every one is 8.
    """

    bits: int
    out_features: int
    in_features: int
    group_size: int
    packed: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def activation_group(self) -> int:
        """Inputs that share an activation scale."""
        return self.group_size if self.bits == 4 else ACTIVATION_GROUP


def pack(bits: int, stored: Tensor, scales: Tensor, zeros: Tensor | None = None) -> PackedWeight:
    """stored: int8 [out, in], or for 4 bits bytes [out, in / 2]; scales [out, groups] in the stored dtype.

    zeros: uint8 [out, groups], the level 0..15 that stands for 0; for 4 bits only.
    """
    stored = stored.contiguous()
    in_features = stored.shape[1] * 8 // bits
    packed = _packed_bytes(bits, len(stored), in_features)
    _pack(FORMATS[bits], threads(), len(stored), in_features, stored.data_ptr(), packed.data_ptr())
    return _weight(bits, packed, scales, zeros, in_features=in_features)


def unpack(weight: PackedWeight) -> Tensor:
    """What `pack` was given as `stored`."""
    outputs, inputs = weight.out_features, weight.in_features
    columns, dtype = (inputs, torch.int8) if weight.bits == 8 else (inputs // 2, torch.uint8)
    stored = torch.empty(outputs, columns, dtype=dtype)
    _unpack(FORMATS[weight.bits], threads(), outputs, inputs, stored.data_ptr(), weight.packed.data_ptr())
    return stored


def quantize(
    bits: int, weight: Tensor, group_size: int, *, symmetric: bool = True
) -> tuple[PackedWeight, Tensor] | None:
    """Round a weight [out, in] to nearest and pack it; also the scales [out, groups]. None for NaN or infinity.

    The same levels, scales and zero points, bit for bit, as linear.rtn gives. group_size and symmetric are read for
    4 bits only.
    """
    out_features, in_features = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    group = in_features if bits == 8 else group_size
    packed = _packed_bytes(bits, out_features, in_features)
    scales = torch.empty(out_features, in_features // group, dtype=weight.dtype)
    zeros = None if symmetric or bits == 8 else torch.empty(scales.shape, dtype=torch.uint8)
    finite = torch.zeros(1, dtype=torch.bool)
    _quantize_weight(
        FORMATS[bits], DTYPES[weight.dtype], threads(), out_features, in_features, group,
        weight.data_ptr(), weight.stride(0), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(),
        packed.data_ptr(), finite.data_ptr(),
    )  # fmt: skip
    return (_weight(bits, packed, scales, zeros, in_features=in_features), scales) if finite else None


def _packed_bytes(bits: int, out_features: int, in_features: int) -> Tensor:
    outputs, inputs = -(-out_features // BLOCK) * BLOCK, -(-in_features // 4) * 4
    packed = torch.empty(outputs * inputs * bits // 8, dtype=torch.uint8)
    large_pages(packed)
    return packed


def _weight(bits: int, packed: Tensor, scales: Tensor, zeros: Tensor | None, *, in_features: int) -> PackedWeight:
    out_features, groups = scales.shape
    scales = _by_block(scales)
    return PackedWeight(
        bits, out_features, in_features, in_features // groups, packed,
        scales.float().flatten() if bits == 8 else scales,
        None if zeros is None else _by_block(zeros),
    )  # fmt: skip


def _by_block(values: Tensor) -> Tensor:
    """[out, groups] -> [blocks, groups, 64], the last block padded with zeros."""
    out_features, groups = values.shape
    blocks = -(-out_features // BLOCK)
    padded = values.new_zeros(blocks * BLOCK, groups)
    padded[:out_features] = values
    return padded.view(blocks, BLOCK, groups).transpose(1, 2).contiguous()


def _by_output(values: Tensor, out_features: int) -> Tensor:
    """The way back."""
    return values.transpose(1, 2).reshape(-1, values.shape[1])[:out_features].contiguous()


def stored_scales(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The scales [out, groups] that `pack` was given, which were of this dtype."""
    if weight.bits == 8:
        return weight.scales[: weight.out_features].to(dtype).unsqueeze(1)
    return _by_output(weight.scales, weight.out_features)


def stored_zeros(weight: PackedWeight) -> Tensor | None:
    """The zero points [out, groups] that `pack` was given."""
    return None if weight.zeros is None else _by_output(weight.zeros, weight.out_features)


class IntegerLinear:
    """Weights of one format that share their input, multiplied in one call.

    x [rows, in], any float dtype, last dimension contiguous -> [rows, sum of out] in x's dtype. epilogue "silu",
    "gelu" or "gelu_tanh": of two weights, act(x W0^T + b0) * (x W1^T + b1), [rows, out]. The result is rounded once.
    Activations are rounded to INT8 with a scale per row and group of inputs.
    Row i of the result depends on row i of x alone, and is the same on every instruction set.
    """

    def __init__(
        self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None], *, epilogue: str | None = None
    ) -> None:
        first = weights[0]
        self.keep_alive: list[Any] = [*weights, *biases]
        self._biases: list[tuple[Any, Tensor]] = []
        matrices, column = (Matrix * len(weights))(), 0
        for matrix, weight, bias in zip(matrices, weights, biases, strict=True):
            matrix.out_features, matrix.column = weight.out_features, column
            matrix.weight, matrix.scales = weight.packed.data_ptr(), weight.scales.data_ptr()
            matrix.scale_dtype = DTYPES[weight.scales.dtype]
            matrix.zeros = None if weight.zeros is None else weight.zeros.data_ptr()
            if bias is not None:
                self._biases.append((matrix, bias))
            column += weight.out_features
        self.in_features = first.in_features
        self.out_features = column if epilogue is None else first.out_features
        self._linear = Linear(
            FORMATS[first.bits], first.activation_group, first.in_features, len(weights), EPILOGUES[epilogue], matrices
        )
        self._address = ctypes.addressof(self._linear)

    def __call__(self, x: Tensor) -> Tensor:
        rows, dtype = x.shape[0], DTYPES[x.dtype]
        for matrix, bias in self._biases:
            if matrix.bias != bias.data_ptr():  # `bias.data = other` since
                matrix.bias, matrix.bias_dtype = bias.data_ptr(), DTYPES[bias.dtype]
        out = x.new_empty(rows, self.out_features)
        _integer_linear(
            self._address, x.data_ptr(), x.stride(0), rows, out.data_ptr(), self.out_features, dtype, dtype, threads()
        )
        return out


@torch.library.custom_op("hf_accel::integer_linear", mutates_args=())
def recorded_linear(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, bits: int,
    out_features: int, in_features: int, group_size: int,
) -> Tensor:  # fmt: skip
    """IntegerLinear of one weight as an operator that torch can record: in compiled and exported graphs."""
    weight = PackedWeight(bits, out_features, in_features, group_size, packed, scales, zeros)
    return IntegerLinear([weight], [bias])(x.contiguous())


@recorded_linear.register_fake
def _(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, bits: int,
    out_features: int, in_features: int, group_size: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], out_features)
