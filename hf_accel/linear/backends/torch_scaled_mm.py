"""FP8 weights times FP8 activations by torch's own product: for GPUs on which there is no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.triton import FP8, capability
from ..activations import quantize_rows
from ..formats import FLOAT8, Float8Weight, QuantizedWeight
from .backend import Backend, LinearSpec

MULTIPLE = 16  # inputs and outputs that torch._scaled_mm takes


class TorchScaledMM(Backend):
    """Rounds each row to FP8 with a scale of its own and sums in float32; the result is rounded to bfloat16."""

    name = "torch"
    layouts = ("fp8",)
    device_types = ("cuda",)
    dtypes = (torch.bfloat16,)  # the one that torch returns where rows have scales
    activations = "fp8"
    reference = "reference by row"

    def refuses(self, spec: LinearSpec) -> str | None:
        reason = super().refuses(spec)
        if reason is None and (spec.in_features % MULTIPLE or spec.out_features % MULTIPLE):
            return f"it takes multiples of {MULTIPLE}, not {spec.in_features} inputs and {spec.out_features} outputs"
        return reason or self._missing()

    def _missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "torch sees no NVIDIA GPU here"
        return None if capability() >= FP8 else "it needs a GPU that multiplies FP8, of compute capability 8.9"

    def pack(self, weight: QuantizedWeight) -> Float8Weight:
        assert isinstance(weight, Float8Weight)
        return Float8Weight(weight.weight.contiguous(), weight.weight_scale)

    def unpack(self, packed: Float8Weight) -> Float8Weight:
        return packed

    def run(self, x: Tensor, packed: Float8Weight, bias: Tensor | None) -> Tensor:
        if not len(x):
            return x.new_empty(0, packed.shape[0])
        levels, scale = quantize_rows(x, "fp8")
        # A row that is not finite has a scale that is not; its levels may be anything.
        out: Tensor = torch._scaled_mm(
            levels.nan_to_num_().to(FLOAT8), packed.weight.t(), scale_a=scale,
            scale_b=packed.weight_scale.float().t().contiguous(), out_dtype=x.dtype,
        )  # fmt: skip
        return out if bias is None else out + bias
