"""INT8 weights times INT8 activations by torch's own product of integers: for GPUs on which there is no Triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import quantize_rows
from ..formats import Int8Weight, QuantizedWeight
from .backend import Backend, LinearSpec

LEAST_ROWS = 17  # torch._int_mm takes no fewer on a GPU
SIZE_MULTIPLE = 8  # and inputs and outputs in multiples of it


class TorchIntMM(Backend):
    """Rounds each row to INT8 and sums in int32, so that a row's result does not depend on its neighbours.

    A row has one scale, where our kernels have one for each group of inputs: an outlier spoils its whole row. So it is
    no candidate where these are: measuring chooses among ways to compute one thing.
    """

    name = "torch"
    layouts = ("int8",)
    device_types = ("cuda",)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    activations = "int8"
    reference = "reference by row"
    row_invariant = True
    finds_rows = True

    def refuses(self, spec: LinearSpec) -> str | None:
        reason = super().refuses(spec)
        if reason is None and (spec.in_features % SIZE_MULTIPLE or spec.out_features % SIZE_MULTIPLE):
            return (
                f"it takes multiples of {SIZE_MULTIPLE}, not {spec.in_features} inputs and {spec.out_features} outputs"
            )
        return reason or self._missing()

    def _missing(self) -> str | None:
        return None if torch.cuda.is_available() else "torch sees no NVIDIA GPU here"

    def pack(self, weight: QuantizedWeight) -> Int8Weight:
        assert isinstance(weight, Int8Weight)
        return Int8Weight(weight.weight.contiguous(), weight.weight_scale)

    def unpack(self, packed: Int8Weight) -> Int8Weight:
        return packed

    def run(self, x: Tensor, packed: Int8Weight, bias: Tensor | None) -> Tensor:
        levels, scale = quantize_rows(x)
        # A row that is not finite has a scale that is not; its levels may be anything.
        integers = F.pad(levels.nan_to_num_(), (0, 0, 0, max(0, LEAST_ROWS - len(x)))).to(torch.int8)
        out = torch._int_mm(integers, packed.weight.t())[: len(x)] * scale * packed.weight_scale.float().t()
        return (out if bias is None else out + bias).to(x.dtype)
