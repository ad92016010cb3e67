"""INT8 weights times bfloat16 activations through torch's own kernel: good for a few rows of a small layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import Int8Weight, QuantizedWeight, chunks
from .backend import Backend, LinearSpec

READ_ROWS = 4  # beyond, the kernel reads the weight again for every 4 rows
ALIGNMENT = 64  # bytes; the kernel loads whole aligned vectors
VECTOR = 16  # inputs in one of them


class TorchInt8(Backend):
    """Keeps activations in bfloat16; many rows dequantize the weight in chunks and use torch's matmul."""

    name = "torch"
    layouts = ("int8",)
    device_types = ("cpu",)
    dtypes = (torch.bfloat16,)
    finds_rows = True

    def refuses(self, spec: LinearSpec) -> str | None:
        reason = super().refuses(spec)
        if reason is None and spec.in_features % VECTOR:
            # The kernel does not check, and reads past the end of the row.
            return f"it needs inputs in multiples of {VECTOR}, not {spec.in_features}"
        return reason

    def pack(self, weight: QuantizedWeight) -> Int8Weight:
        assert isinstance(weight, Int8Weight)
        return Int8Weight(aligned(weight.weight), weight.weight_scale)

    def unpack(self, packed: Int8Weight) -> Int8Weight:
        return packed

    def run(self, x: Tensor, packed: Int8Weight, bias: Tensor | None) -> Tensor:
        scales = packed.weight_scale.flatten()
        if len(x) <= READ_ROWS:
            out = torch._weight_int8pack_mm(aligned(x), packed.weight, scales)
        else:
            out = _many_rows(x, packed.weight).mul_(scales)
        return out if bias is None else out + bias


def _many_rows(x: Tensor, integers: Tensor) -> Tensor:
    """x [rows, in] @ integers [out, in]^T: scaling the result costs less than scaling the weight."""
    out = x.new_empty(len(x), len(integers))
    for outputs in chunks(len(integers)):
        out[:, outputs] = F.linear(x, integers[outputs].to(x.dtype))
    return out


def aligned(values: Tensor) -> Tensor:
    """`values`, copied if a view or a file mapping left them off the kernel's alignment."""
    values = values.contiguous()
    return values.clone() if values.data_ptr() % ALIGNMENT else values
