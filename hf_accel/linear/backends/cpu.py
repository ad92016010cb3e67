"""INT8 and INT4 weights times INT8 activations through the native CPU kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...config import WeightConfig
from ...hardware.large_pages import in_large_pages
from ...kernels import cpu as kernels
from ...kernels.cpu.integer_linear import (
    IntegerExperts,
    IntegerLinear,
    PackedWeight,
    factors_of,
    few_stored_rows,
    pack,
    quantize,
    recorded_linear,
    stored_by_group,
    stored_rows,
    stored_scales,
    unpack,
)
from ...kernels.cpu.library import FLOATS, native
from ...keywords import one_of
from ...tensors import is_recorded
from ..formats import (
    Float4Weight,
    Int4Weight,
    Int8Weight,
    Layout,
    LowBitWeight,
    QuantizedWeight,
    check_group_size,
    kind_of,
    pack_zero_points,
    scaled,
    with_minimum,
)
from ..formats.blocks import ALIGNMENT, BLOCK, LABELS, Blocks, tensors_of
from ..methods.rtn import refuse_not_finite
from .backend import Backend, GroupedExperts, LinearSpec

GROUP_MULTIPLE = 8  # inputs
FEW = 4  # rows that are found one by one, as those of a decode step
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
        self.native: IntegerExperts | None = None

    def serves(self, x: Tensor) -> bool:
        return native(x)

    def run(self, x: Tensor, starts: Tensor, biases: Tensor | None) -> Tensor:
        if self.native is None or self.biases is not biases:
            self.native, self.biases = IntegerExperts([part.weight for part in self.parts], biases), biases
        return self.native.grouped(x.contiguous(), starts)


def maps_weights() -> bool:
    """Return whether weights stay in the file that they were saved in, so that processes share them.

    Otherwise they are copied into memory with large pages, which kernels read faster than the small pages of a file.
    Raises UnsupportedError for a bad HF_ACCEL_MAP_WEIGHTS.
    """
    asked = os.environ.get(MAP_WEIGHTS) or "0"
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
    layouts = ("int8", "int4", "mxfp4", "nvfp4")
    device_types = ("cpu",)
    dtypes = FLOATS
    activations = "int8"
    row_invariant = True
    own_formats_only = False
    finds_rows = True

    def refuses(self, spec: LinearSpec) -> str | None:
        reason = super().refuses(spec) or kernels.refusal()
        group_size = spec.layout.group_size
        if reason is None and group_size is not None and group_size % GROUP_MULTIPLE:
            return f"it takes groups of a multiple of {GROUP_MULTIPLE} inputs, not {group_size}"
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
        zero_point = weight.zero_points()
        zeros = None if zero_point is None else (zero_point + 8).view(torch.uint8)
        packed = pack(4, weight.weight_packed.view(torch.uint8), scale, zeros, minima=weight.weight_minimum)
        return CpuWeight(packed, weight.layout)

    def quantize(self, weight: Tensor, config: WeightConfig) -> CpuWeight:
        layout, group_size = config.layout, config.layout.group_size or weight.shape[1]
        check_group_size((weight.shape[0], weight.shape[1]), group_size)
        result = quantize(layout.bits, weight.detach(), group_size, symmetric=layout.symmetric)
        if result is None:
            refuse_not_finite()
        return CpuWeight(result[0], replace(layout, scale_dtype=weight.dtype))

    def unpack(self, packed: CpuWeight) -> QuantizedWeight:
        kind, scale_dtype, divisor = kind_of(packed.layout), packed.layout.scale_dtype, packed.weight.divisor
        assert scale_dtype is not None
        stored, scale = unpack(packed.weight), stored_scales(packed.weight, scale_dtype)
        if issubclass(kind, Float4Weight):
            return kind.of_factors(stored, scale, torch.tensor([divisor], device="cpu"))
        minimum = stored_by_group(packed.weight, "minima")
        if packed.weight.bits == 8:
            return Int8Weight(stored, scale, None, minimum)
        shape = torch.tensor([packed.weight.out_features, packed.weight.in_features], device="cpu")
        zeros = stored_by_group(packed.weight, "zeros")
        zero_point = None if zeros is None else pack_zero_points(zeros.view(torch.int8) - 8)
        return Int4Weight(stored.view(torch.int32), scale, shape, zero_point, minimum)

    def blocks(self, packed: CpuWeight) -> Blocks | None:
        weight, layout = packed.weight, packed.layout
        if layout.label not in LABELS:
            return None
        outputs, scales = -(-weight.out_features // BLOCK), weight.scales
        if scales.ndim == 1:
            assert layout.scale_dtype is not None
            scales = scales.to(layout.scale_dtype).view(outputs, 1, BLOCK)
        return Blocks(weight.packed.view(outputs, -1), scales, weight.zeros, weight.minima)

    def adopt(self, blocks: Blocks, layout: Layout, shape: tuple[int, int]) -> CpuWeight | None:
        if not maps_weights() or blocks.weight_blocks.data_ptr() % ALIGNMENT:  # in a checkpoint of several files
            blocks = Blocks(**{name: _in_large_pages(tensor) for name, tensor in tensors_of(blocks).items()})
        scales, group_size = blocks.weight_scale, shape[1] // blocks.weight_scale.shape[1]
        if layout.bits == 8 and group_size == shape[1] and blocks.weight_minimum is None:
            scales = scales.float().flatten()
        packed = blocks.weight_blocks.view(-1)
        weight = PackedWeight(
            layout.bits, *shape, group_size, packed, scales, blocks.weight_zeros, blocks.weight_minimum
        )
        return CpuWeight(weight, replace(layout, scale_dtype=blocks.weight_scale.dtype, ordered=False))

    def rows(self, packed: CpuWeight, indices: Tensor, dtype: torch.dtype) -> Tensor:
        weight, scale_dtype = packed.weight, packed.layout.scale_dtype
        assert scale_dtype is not None
        if weight.divisor is not None:
            return super().rows(packed, indices, dtype)
        wanted: Tensor | list[int] = indices
        if 0 < len(indices) <= FEW and not is_recorded():
            wanted = indices.tolist()
            levels = few_stored_rows(weight, wanted)
        else:
            levels = stored_rows(weight, indices)
        if weight.scales.ndim == 1:
            return scaled(levels, weight.scales.index_select(0, indices).to(scale_dtype).unsqueeze(1), dtype)
        grouped = levels.view(len(levels), weight.in_features // weight.group_size, weight.group_size)
        if weight.bits == 4 and weight.minima is None:
            zeros = 8 if weight.zeros is None else factors_of(weight.zeros, wanted).unsqueeze(-1)
            grouped = grouped.view(torch.int8) - zeros
        minima = None if weight.minima is None else factors_of(weight.minima, wanted).unsqueeze(-1)
        return with_minimum(grouped, factors_of(weight.scales, wanted).unsqueeze(-1), minima, dtype).flatten(1)

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
