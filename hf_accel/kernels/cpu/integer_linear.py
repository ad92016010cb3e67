"""Linear layers with packed weights of 8, 4, 3 or 2 bits and INT8 activations."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ...hardware.large_pages import in_large_pages
from .. import ACTIVATION_GROUP
from .library import DTYPES, ExpertsCall, Linear, LinearCall, Matrix, epilogue_number, fields, kernel, threads

BLOCK = 64  # outputs of a packed block
FORMATS = {8: 3, 4: 5, 3: 8, 2: 9}  # the Dtype of types.h for each number of bits
INT8_GROUPS = 6  # that of 8 bits whose scales belong to groups of inputs
FP4 = 7  # that of 4 bits that are floats (E2M1)
# The fewest rows that tiles multiply (AMX), for each number of bits. With fewer, dot products of vectors are faster,
# which read several blocks side by side; `python -m benchmarks.run tiles` measures it. The results have the same bits.
# On an Intel Xeon with 2 threads 8 rows took tiles 1.15 (8 bits) and 0.96 (4 bits) times as long, and 10 rows 0.97 and
# 0.90 times.
TILE_ROWS = {8: 9, 4: 8, 3: 7, 2: 7}


class PackCall(Structure):
    _fields_ = fields(ints="format threads", sizes="out_features in_features", pointers="stored packed")


class RowsCall(Structure):
    _fields_ = fields(pointers="linear outputs", sizes="rows", pointers_="out known", ints="out_dtype threads")


class QuantizeCall(Structure):
    _fields_ = fields(
        ints="format dtype threads", sizes="out_features in_features group", pointers="weight",
        sizes_="weight_stride", pointers_="scales zeros packed finite",
    )  # fmt: skip


_integer_linear = kernel("integer_linear", LinearCall)
_integer_experts = kernel("integer_experts", ExpertsCall)
_pack = kernel("pack", PackCall)
_unpack = kernel("unpack", PackCall)
_rows = kernel("rows", RowsCall)
_quantize_weight = kernel("quantize_weight", QuantizeCall)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] that is packed in blocks of 64 outputs. The last block is padded.

    packed: uint8; src/kernels.h describes its layout. scales: for 8 bits with a scale for each output, [blocks * 64]
    float32; otherwise [blocks, groups, 64] of the stored dtype. For fewer bits only: zeros, the zero points [blocks,
    groups, 64] uint8, each a level, or None if all are 2^(bits - 1); the weight is (level - zero) * scale. Or minima,
    with scales of groups only, [blocks, groups, 64] of the scales' dtype; the weight is then level * scale - minimum,
    with levels from 0 to 2^bits - 1, or from -128 to 127 for 8 bits. divisor: of all scales, for floats of 4 bits
    (E2M1); None for integers.
    """

    bits: int
    out_features: int
    in_features: int
    group_size: int
    packed: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None
    divisor: float | None = None

    @property
    def format(self) -> int:
        """The Dtype of types.h."""
        if self.divisor is not None:
            return FP4
        return INT8_GROUPS if self.bits == 8 and self.scales.ndim == 3 else FORMATS[self.bits]

    @property
    def activation_group(self) -> int:
        """The number of inputs that share an activation scale."""
        return ACTIVATION_GROUP if self.format == FORMATS[8] else self.group_size


def pack(
    bits: int, stored: Tensor, scales: Tensor, zeros: Tensor | None = None, *, minima: Tensor | None = None,
    divisor: float | None = None,
) -> PackedWeight:  # fmt: skip
    """Pack a quantized weight.

    stored: [out, in] int8; for fewer bits, [out, in * bits / 8] uint8, the first input in the lowest bits. scales:
    [out, groups]. minima: [out, groups], of the scales' dtype. zeros: for fewer bits only, [out, groups] uint8, the
    levels that stand for the weight 0. With 4, 3 and 2 bits inputs come by 8, 32 and 16.
    divisor: for floats of 4 bits only, what all scales are divided by.
    """
    stored = stored.contiguous()
    in_features = stored.shape[1] * 8 // bits
    packed = _packed_bytes(bits, len(stored), in_features)
    _pack(FORMATS[bits], threads(), len(stored), in_features, stored.data_ptr(), packed.data_ptr())
    weight = _weight(bits, packed, scales, zeros=zeros, minima=minima, in_features=in_features)
    return replace(weight, divisor=divisor)


def unpack(weight: PackedWeight) -> Tensor:
    """Return the `stored` levels that `pack` was given."""
    outputs, inputs = weight.out_features, weight.in_features
    dtype = torch.int8 if weight.bits == 8 else torch.uint8
    stored = torch.empty(outputs, inputs * weight.bits // 8, dtype=dtype, device="cpu")
    _unpack(FORMATS[weight.bits], threads(), outputs, inputs, stored.data_ptr(), weight.packed.data_ptr())
    return stored


def quantize(
    bits: int, weight: Tensor, group_size: int, *, symmetric: bool = True
) -> tuple[PackedWeight, Tensor] | None:
    """Round a weight [out, in] to nearest and pack it. Returns it with its scales [out, groups].

    Returns None if the weight holds NaN or infinity. The levels, scales and zero points have the same bits as those of
    linear.methods.rtn. group_size: for 8 bits, all inputs where scales belong to outputs. symmetric is used for fewer
    bits only.
    """
    out_features, in_features = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    packed = _packed_bytes(bits, out_features, in_features)
    scales = weight.new_empty(out_features, in_features // group_size)
    zeros = None if symmetric or bits == 8 else scales.new_empty(scales.shape, dtype=torch.uint8)
    finite = scales.new_zeros(1, dtype=torch.bool)
    _quantize_weight(
        FORMATS[bits], DTYPES[weight.dtype], threads(), out_features, in_features, group_size,
        weight.data_ptr(), weight.stride(0), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(),
        packed.data_ptr(), finite.data_ptr(),
    )  # fmt: skip
    return (_weight(bits, packed, scales, zeros=zeros, in_features=in_features), scales) if finite else None


def _packed_bytes(bits: int, out_features: int, in_features: int) -> Tensor:
    outputs, inputs = -(-out_features // BLOCK) * BLOCK, -(-in_features // 4) * 4
    return in_large_pages(outputs * inputs * bits // 8)


def _weight(
    bits: int, packed: Tensor, scales: Tensor, *, zeros: Tensor | None, minima: Tensor | None = None, in_features: int
) -> PackedWeight:
    out_features, groups = scales.shape
    scales = by_block(scales)
    return PackedWeight(
        bits, out_features, in_features, in_features // groups, packed,
        scales.float().flatten() if bits == 8 and groups == 1 and minima is None else scales,
        None if zeros is None else by_block(zeros), None if minima is None else by_block(minima),
    )  # fmt: skip


def by_block(values: Tensor) -> Tensor:
    """Convert [out, groups] to [blocks, groups, 64]. The last block is padded with zeros."""
    out_features, groups = values.shape
    blocks = -(-out_features // BLOCK)
    padded = values.new_zeros(blocks * BLOCK, groups)
    padded[:out_features] = values
    return padded.view(blocks, BLOCK, groups).transpose(1, 2).contiguous()


def by_output(values: Tensor, out_features: int) -> Tensor:
    """Copy [blocks, groups, 64] to [out, groups]."""
    rows = values.transpose(1, 2).reshape(-1, values.shape[1])[:out_features]
    return rows.clone(memory_format=torch.contiguous_format)


def stored_scales(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return a copy of the scales [out, groups] that `pack` was given. dtype: the dtype that they had.

    A pickle for another process moves the numbers of its tensors, and native calls hold the address of these.
    """
    if weight.scales.ndim == 1:
        return weight.scales[: weight.out_features].to(dtype, copy=True).unsqueeze(1)
    return by_output(weight.scales, weight.out_features)


def stored_by_group(weight: PackedWeight, name: Literal["zeros", "minima"]) -> Tensor | None:
    """Return the zero points or the minima [out, groups] that `pack` was given, or None."""
    values: Tensor | None = getattr(weight, name)
    return None if values is None else by_output(values, weight.out_features)


class IntegerLinear:
    """Computes x @ W.T + b for several packed weights of one format in one call.

    x: [rows, in] of a dtype of FLOATS. Returns [rows, sum of out] of the same dtype. With the
    epilogue "silu", "gelu" or "gelu_tanh" there are two weights, and the result is act(x W0^T + b0) * (x W1^T + b1),
    [rows, out]. With an `activation` of structs.ACTIVATIONS, for any number of weights, the result is act(x W^T + b).
    The result is rounded once. Activations are quantized to INT8 with a scale for each row and group of
    inputs. Row i of the result depends only on row i of x, and has the same bits on every instruction set.

    tile_rows: the fewest rows that tiles multiply, on a CPU that has them (AMX); None for those of TILE_ROWS.
    """

    def __init__(
        self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None], *, epilogue: str | None = None,
        activation: str | None = None, tile_rows: int | None = None,
    ) -> None:  # fmt: skip
        first, number = weights[0], epilogue_number(epilogue, activation)
        self.keep_alive: list[Any] = [*weights, *biases]
        self._biases: list[tuple[Any, Tensor]] = []
        matrices, column = (Matrix * len(weights))(), 0
        for matrix, weight, bias in zip(matrices, weights, biases, strict=True):
            matrix.out_features, matrix.column = weight.out_features, column
            matrix.weight, matrix.scales = weight.packed.data_ptr(), weight.scales.data_ptr()
            matrix.scale_dtype = DTYPES[weight.scales.dtype]
            matrix.zeros = None if weight.zeros is None else weight.zeros.data_ptr()
            matrix.minima = None if weight.minima is None else weight.minima.data_ptr()
            matrix.divisor = weight.divisor or 1.0
            if bias is not None:
                self._biases.append((matrix, bias))
            column += weight.out_features
        self.in_features = first.in_features
        self.out_features = column if epilogue is None else first.out_features
        self._linear = Linear(
            first.format, first.activation_group, first.in_features, len(weights), number, 0, matrices
        )
        self._address = ctypes.addressof(self._linear)
        self.tile_rows = TILE_ROWS[first.bits] if tile_rows is None else tile_rows

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """out: what the result is written to, contiguous, of the dtype of x; None makes one."""
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, dtype, address = x.shape[0], DTYPES[x.dtype], self.address()
        out = x.new_empty(rows, self.out_features) if out is None else out
        _integer_linear(
            address, x.data_ptr(), x.stride(0), rows, out.data_ptr(), self.out_features, dtype, dtype, threads(),
            self.tile_rows,
        )  # fmt: skip
        return out

    def rows(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Look outputs of the one weight up: integers [n] -> [n, in], dequantized in float32 and rounded to a dtype of
        FLOATS.

        Raises IndexError for outputs that the weight has not.
        """
        outputs, known = outputs.to(torch.int64).contiguous(), ctypes.c_uint8()
        out = torch.empty(len(outputs), self.in_features, dtype=dtype, device="cpu")
        _rows(
            self._address, outputs.data_ptr(), len(outputs), out.data_ptr(), ctypes.addressof(known), DTYPES[dtype],
            threads(),
        )  # fmt: skip
        if not known:
            raise IndexError(f"outputs {int(outputs.min())} to {int(outputs.max())} of {self.out_features}")
        return out

    def address(self) -> int:
        """The address of the C struct, which names the memory that the biases have now."""
        for matrix, bias in self._biases:
            if matrix.bias != bias.data_ptr():  # someone has assigned to bias.data
                matrix.bias, matrix.bias_dtype = bias.data_ptr(), DTYPES[bias.dtype]
        return self._address


class IntegerExperts(IntegerLinear):
    """Computes x @ W.T + b with one of several packed weights of one shape for each row, in one call.

    biases: [experts, out] of a dtype of FLOATS, the last stride 1, or None. Each row has the bits that IntegerLinear
    gives it. Weights without rows are not read.
    """

    def __init__(self, weights: Sequence[PackedWeight], biases: Tensor | None) -> None:
        super().__init__(weights, [None] * len(weights))
        self.out_features, self._of_experts, self.count = weights[0].out_features, biases, len(weights)
        for index in range(len(weights)):
            self._linear.matrices[index].column = 0

    def address(self) -> int:
        biases, matrices = self._of_experts, self._linear.matrices
        if biases is not None and matrices[0].bias != biases.data_ptr():
            for index in range(len(biases)):
                matrices[index].bias = biases.data_ptr() + index * biases.stride(0) * biases.itemsize
                matrices[index].bias_dtype = DTYPES[biases.dtype]
        return self._address

    def grouped(self, x: Tensor, starts: Tensor) -> Tensor:
        """x: [rows, in], contiguous; rows starts[e] to starts[e + 1], int64 [experts + 1], go to weight e."""
        rows, dtype, address = x.shape[0], DTYPES[x.dtype], self.address()
        out = x.new_empty(rows, self.out_features)
        _integer_experts(
            address, x.data_ptr(), x.stride(0), rows, out.data_ptr(), self.out_features, starts.data_ptr(), dtype,
            dtype, threads(), self.tile_rows,
        )  # fmt: skip
        return out


@torch.library.custom_op("hf_accel::integer_linear", mutates_args=())
def recorded_linear(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, minima: Tensor | None, bias: Tensor | None,
    bits: int, out_features: int, in_features: int, group_size: int, divisor: float | None,
) -> Tensor:  # fmt: skip
    """IntegerLinear of one weight as a torch operator, which compiled and exported graphs can record."""
    weight = PackedWeight(bits, out_features, in_features, group_size, packed, scales, zeros, minima, divisor)
    return IntegerLinear([weight], [bias])(x.contiguous())


@torch.library.custom_op("hf_accel::integer_rows", mutates_args=())
def recorded_rows(
    outputs: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, minima: Tensor | None, dtype: torch.dtype,
    bits: int, out_features: int, in_features: int, group_size: int,
) -> Tensor:  # fmt: skip
    """`IntegerLinear.rows` of one weight as a torch operator."""
    weight = PackedWeight(bits, out_features, in_features, group_size, packed, scales, zeros, minima)
    return IntegerLinear([weight], [None]).rows(outputs, dtype)


@recorded_rows.register_fake
def _(
    outputs: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, minima: Tensor | None, dtype: torch.dtype,
    bits: int, out_features: int, in_features: int, group_size: int,
) -> Tensor:  # fmt: skip
    return scales.new_empty(outputs.shape[0], in_features, dtype=dtype)


@recorded_linear.register_fake
def _(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, minima: Tensor | None, bias: Tensor | None,
    bits: int, out_features: int, in_features: int, group_size: int, divisor: float | None,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], out_features)
