"""Integer weights of 8, 4, 3 and 2 bits, and floats of 4, times INT8 activations through the native CPU kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...config import WeightConfig
from ...hardware.file_pages import staying
from ...hardware.large_pages import in_large_pages
from ...kernels import cpu as kernels
from ...kernels.cpu.integer_linear import (
    IntegerExperts,
    IntegerLinear,
    PackedWeight,
    pack,
    quantize,
    recorded_linear,
    recorded_rows,
    stored_by_group,
    stored_scales,
    unpack,
)
from ...kernels.cpu.library import FLOATS, native
from ...keywords import one_of
from ...tensors import is_recorded
from ..formats import (
    Float4Weight,
    Int8Weight,
    Layout,
    LowBitWeight,
    QuantizedWeight,
    check_group_size,
    kind_of,
    pack_zero_points,
)
from ..formats.blocks import ALIGNMENT, BLOCK, UNIT_INPUTS, Blocks, tensors_of
from ..methods.rtn import refuse_not_finite
from .backend import Backend, GroupedExperts, LinearSpec

GROUP_MULTIPLE = 8  # inputs, at any number of bits
MAP_WEIGHTS = "HF_ACCEL_MAP_WEIGHTS"  # a variable of the environment


@dataclass(eq=False)
class CpuWeight:
    """layout: of the stored weight. linear: the call, made for the bias that it was last run with."""

    weight: PackedWeight
    layout: Layout = field(compare=False)
    bias: Tensor | None = field(default=None, compare=False)
    linear: IntegerLinear | None = field(default=None, compare=False)

    def call(self, bias: Tensor | None) -> IntegerLinear:
        if self.linear is None or self.bias is not bias:
            self.bias, self.linear = bias, IntegerLinear([self.weight], [bias])
        return self.linear


class CpuExperts(GroupedExperts):
    """The native call, made for the biases that it was last run with."""

    def __init__(self, parts: Sequence[CpuWeight]) -> None:
        self.parts = list(parts)
        self.biases: Tensor | None = None
        self.call: IntegerExperts | None = None

    def serves(self, x: Tensor) -> bool:
        return native(x)

    def run(self, x: Tensor, starts: Tensor, biases: Tensor | None) -> Tensor:
        return self.native(biases).grouped(x.contiguous(), starts)

    def native(self, biases: Tensor | None) -> IntegerExperts:
        if self.call is None or self.biases is not biases:
            self.call, self.biases = IntegerExperts([part.weight for part in self.parts], biases), biases
        return self.call


def maps_weights() -> bool:
    """Return whether weights stay in the file that they were saved in, so that processes share them.

    Otherwise they are copied into memory with large pages, which kernels read faster than the small pages that a file
    may have. Raises UnsupportedError for a bad HF_ACCEL_MAP_WEIGHTS.
    """
    asked = os.environ.get(MAP_WEIGHTS) or "1"
    one_of(MAP_WEIGHTS, asked, ("0", "1"))
    return asked == "1"


def _in_large_pages(tensor: Tensor) -> Tensor:
    return in_large_pages(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


class Cpu(Backend):
    """Rounds activations to INT8 with a scale per row and group of inputs, and sums each group in int32.

    Groups are those of the weight, or 128 inputs where its scales belong to outputs, so that an outlier channel spoils
    its own group only. A row's result depends neither on its neighbours, nor on threads, nor on the instruction set.
    """

    name = "cpu"
    layouts = ("int8", "int4", "int3", "int2", "mxfp4", "nvfp4")
    device_types = ("cpu",)
    dtypes = FLOATS
    activations = "int8"
    row_invariant = True
    own_formats_only = False
    finds_rows = True

    def refuses(self, spec: LinearSpec) -> str | None:
        reason = super().refuses(spec) or kernels.refusal()
        group_size, multiple = spec.layout.group_size, max(GROUP_MULTIPLE, UNIT_INPUTS[spec.layout.bits])
        if reason is None and group_size is not None and group_size % multiple:
            return f"it takes groups of a multiple of {multiple} inputs, not {group_size}"
        return reason

    def pack(self, weight: QuantizedWeight) -> CpuWeight:
        scale = weight.weight_scale
        if isinstance(weight, Float4Weight):
            divisor = 1.0 if weight.divisor is None else float(weight.divisor)
            packed = pack(4, weight.weight_packed, weight.factors().to(torch.bfloat16), divisor=divisor)
            return CpuWeight(packed, weight.layout)
        if isinstance(weight, Int8Weight):
            return CpuWeight(pack(8, weight.weight, scale, minima=weight.weight_minimum), weight.layout)
        assert isinstance(weight, LowBitWeight)
        zero_point, half = weight.zero_points(), 1 << weight.bits - 1
        zeros = None if zero_point is None else (zero_point + half).view(torch.uint8)
        packed = pack(weight.bits, weight.weight_packed.view(torch.uint8), scale, zeros, minima=weight.weight_minimum)
        return CpuWeight(packed, weight.layout)

    def quantize(self, weight: Tensor, config: WeightConfig) -> CpuWeight:
        layout, group_size = config.layout, config.layout.group_size or weight.shape[1]
        check_group_size((weight.shape[0], weight.shape[1]), group_size)
        result = quantize(layout.bits, weight.detach(), group_size, symmetric=layout.symmetric)
        if result is None:
            refuse_not_finite()
        return CpuWeight(result[0], replace(layout, scale_dtype=weight.dtype))

    def unpack(self, packed: CpuWeight) -> QuantizedWeight:
        kind, bits, divisor = kind_of(packed.layout), packed.weight.bits, packed.weight.divisor
        scale_dtype = packed.layout.scale_dtype
        assert scale_dtype is not None
        stored, scale = unpack(packed.weight), stored_scales(packed.weight, scale_dtype)
        if issubclass(kind, Float4Weight):
            return kind.of_factors(stored, scale, torch.tensor([divisor], device="cpu"))
        minimum = stored_by_group(packed.weight, "minima")
        if bits == 8:
            return Int8Weight(stored, scale, None, minimum)
        shape = torch.tensor([packed.weight.out_features, packed.weight.in_features], device="cpu")
        zeros = stored_by_group(packed.weight, "zeros")
        zero_point = None if zeros is None else pack_zero_points(zeros.view(torch.int8) - (1 << bits - 1), bits)
        made: QuantizedWeight = kind(stored.view(torch.int32), scale, shape, zero_point, minimum)
        return made

    def blocks(self, packed: CpuWeight) -> Blocks | None:
        weight, layout = packed.weight, packed.layout
        if layout.is_float4:
            return None
        outputs, scales = -(-weight.out_features // BLOCK), weight.scales
        if scales.ndim == 1:
            assert layout.scale_dtype is not None
            scales = scales.to(layout.scale_dtype).view(outputs, 1, BLOCK)
        return Blocks(weight.packed.view(outputs, -1), scales, weight.zeros, weight.minima)

    def adopt(self, blocks: Blocks, layout: Layout, shape: tuple[int, int]) -> CpuWeight | None:
        files, tensors = staying.get(), tensors_of(blocks)
        # In a checkpoint of several files, blocks may begin elsewhere.
        if files is None or blocks.weight_blocks.data_ptr() % ALIGNMENT or not files.keep(tensors.values()):
            blocks = Blocks(**{name: _in_large_pages(tensor) for name, tensor in tensors.items()})
        scales, group_size = blocks.weight_scale, shape[1] // blocks.weight_scale.shape[1]
        if layout.bits == 8 and group_size == shape[1] and blocks.weight_minimum is None:
            scales = scales.float().flatten()
        packed = blocks.weight_blocks.view(-1)
        weight = PackedWeight(
            layout.bits, *shape, group_size, packed, scales, blocks.weight_zeros, blocks.weight_minimum
        )
        return CpuWeight(weight, replace(layout, scale_dtype=blocks.weight_scale.dtype, ordered=False))

    def rows(self, packed: CpuWeight, indices: Tensor, dtype: torch.dtype) -> Tensor:
        w = packed.weight
        if w.divisor is not None:
            return super().rows(packed, indices, dtype)
        if is_recorded():
            found: Tensor = recorded_rows(
                indices, w.packed, w.scales, w.zeros, w.minima, dtype, w.bits, w.out_features, w.in_features,
                w.group_size,
            )  # fmt: skip
            return found
        return (packed.linear or packed.call(None)).rows(indices, dtype)

    def run(self, x: Tensor, packed: CpuWeight, bias: Tensor | None) -> Tensor:
        if is_recorded():
            w = packed.weight
            out: Tensor = recorded_linear(
                x, w.packed, w.scales, w.zeros, w.minima, bias, w.bits, w.out_features, w.in_features, w.group_size,
                w.divisor,
            )  # fmt: skip
            return out
        return packed.call(bias)(x)

    def experts(self, parts: Sequence[CpuWeight]) -> GroupedExperts:
        return CpuExperts(parts)
