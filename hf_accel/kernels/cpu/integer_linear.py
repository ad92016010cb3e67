"""INT8 and INT4 weights times INT8 activations, packed for the kernels."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .library import DTYPES, function, threads
from .structs import EPILOGUES, Linear, Matrix, PackCall, QuantizeCall

BLOCK = 64  # outputs that are packed together
ACTIVATION_GROUP = 128  # inputs that share an activation scale where the weight has no groups of its own
FORMATS = {8: 3, 4: 5}  # bits -> Dtype of types.h
CALL = struct.Struct("=7q3i4x")  # LinearCall of src/linear.h: packed in one step, whatever the number of fields


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] in blocks of 64 outputs (the last one padded).

    packed: uint8, see packing.h. scales: float32 [blocks * 64] for 8 bits; [blocks, groups, 64] in the stored dtype
    for 4 bits. zeros: uint8 [blocks, groups, 64], 0..15, w = (level - zero) * scale; None where it is 8 (4 bits).
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


def pack(bits: int, stored: Tensor, scales: Tensor, in_features: int, zeros: Tensor | None = None) -> PackedWeight:
    """stored: int8 [out, in], or for 4 bits bytes [out, in / 2]; scales [out, groups] in the stored dtype.

    zeros: uint8 [out, groups], the level 0..15 that stands for 0; for 4 bits only.
    """
    packed = _packed_bytes(bits, len(stored), in_features)
    _pack("pack", bits, stored.contiguous(), packed, in_features)
    return _weight(bits, packed, scales, zeros, in_features)


def unpack(weight: PackedWeight) -> Tensor:
    """What `pack` was given as `stored`."""
    columns = weight.in_features if weight.bits == 8 else weight.in_features // 2
    stored = torch.empty(weight.out_features, columns, dtype=torch.int8 if weight.bits == 8 else torch.uint8)
    _pack("unpack", weight.bits, stored, weight.packed, weight.in_features)
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
    call = QuantizeCall(
        FORMATS[bits], DTYPES[weight.dtype], threads(), out_features, in_features, group,
        weight.data_ptr(), weight.stride(0), scales.data_ptr(), None if zeros is None else zeros.data_ptr(),
        packed.data_ptr(), 0,
    )  # fmt: skip
    _function("quantize_weight", POINTER(QuantizeCall))(byref(call))
    return (_weight(bits, packed, scales, zeros, in_features), scales) if call.finite else None


def _packed_bytes(bits: int, out_features: int, in_features: int) -> Tensor:
    outputs, inputs = -(-out_features // BLOCK) * BLOCK, -(-in_features // 4) * 4
    packed = torch.empty(outputs * inputs * bits // 8, dtype=torch.uint8)
    _function("large_pages", c_void_p, c_int64)(packed.data_ptr(), packed.nbytes)
    return packed


def _weight(bits: int, packed: Tensor, scales: Tensor, zeros: Tensor | None, in_features: int) -> PackedWeight:
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


def _pack(name: str, bits: int, stored: Tensor, packed: Tensor, in_features: int) -> None:
    call = PackCall(FORMATS[bits], threads(), len(stored), in_features, stored.data_ptr(), packed.data_ptr())
    _function(name, POINTER(PackCall))(byref(call))


@functools.cache
def _function(name: str, *argtypes: Any) -> Any:
    return function(name, *argtypes)


class IntegerLinear:
    """Weights of one format that share their input, multiplied in one call.

    x [rows, in], any float dtype, last dimension contiguous -> [rows, sum of out] in x's dtype. epilogue "silu",
    "gelu" or "gelu_tanh": of two weights, act(x W0^T + b0) * (x W1^T + b1), [rows, out]. residual like the output is
    added before the only rounding. Activations are rounded to INT8 with a scale per row and group of inputs.
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
        self._address = byref(self._linear)
        self._run = _function("linear", POINTER(Linear), c_char_p)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows, dtype = x.shape[0], DTYPES[x.dtype]
        for matrix, bias in self._biases:
            if matrix.bias != bias.data_ptr():  # `bias.data = other` since
                matrix.bias, matrix.bias_dtype = bias.data_ptr(), DTYPES[bias.dtype]
        out = x.new_empty(rows, self.out_features)
        added = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
        self._run(
            self._address,
            CALL.pack(
                x.data_ptr(), x.stride(0), rows, out.data_ptr(), self.out_features, *added, dtype, dtype,
                threads(),
            ),
        )  # fmt: skip
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
