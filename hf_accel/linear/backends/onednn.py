"""INT8 weights times INT8 activations through oneDNN, as torch ships it: exact integer sums."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..activations import quantize_rows
from ..formats import Int8Weight, QuantizedWeight
from .backend import Backend, LinearSpec

ROWS = 64  # quantized at a time
ZERO_POINT = 128  # unsigned activations: signed ones take a path in oneDNN that is hundreds of times slower


@dataclass(frozen=True, eq=False)
class OneDNNWeight:
    weight: Tensor  # int8 [in, out], opaque: oneDNN's own blocking
    weight_scale: Tensor  # [out, 1], as stored
    scales: Tensor  # float32 [out]
    zero_points: Tensor  # int64 [out], all zero: the weight is symmetric


class OneDNN(Backend):
    """Rounds each row to INT8 and sums in int32, so that a row's result does not depend on its neighbours."""

    name = "onednn"
    layouts = ("int8",)
    device_types = ("cpu",)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    activations = "int8"
    reference = "reference by row"
    row_invariant = True
    slow_start = True  # about 60 microseconds

    def refuses(self, spec: LinearSpec) -> str | None:
        reason = super().refuses(spec)
        return reason or (None if is_exact() else "torch's oneDNN INT8 matmul is not available in this build")

    def pack(self, weight: QuantizedWeight) -> OneDNNWeight:
        assert isinstance(weight, Int8Weight)
        scales = weight.weight_scale.float().flatten()
        packed = torch.ops.onednn.qlinear_prepack(weight.weight, None)
        return OneDNNWeight(packed, weight.weight_scale, scales, scales.new_zeros(len(scales), dtype=torch.int64))

    def unpack(self, packed: OneDNNWeight) -> Int8Weight:
        return Int8Weight(packed.weight.to_dense().t().contiguous(), packed.weight_scale)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it cannot trace an opaque tensor
    def run(self, x: Tensor, packed: OneDNNWeight, bias: Tensor | None) -> Tensor:
        levels, scale = _unsigned_rows(x)
        out = _matmul(levels, packed).mul_(scale)
        return (out if bias is None else out + bias).to(x.dtype)


def _unsigned_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, in] -> uint8 [rows, in] and scales [rows, 1], block by block: the float copies stay in the cache."""
    levels, scales = x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(len(x), 1, dtype=torch.float32)
    for start in range(0, len(x), ROWS):
        block = slice(start, start + ROWS)
        integers, scales[block] = quantize_rows(x[block])
        levels[block] = integers.add_(ZERO_POINT)
    return levels, scales


def _matmul(x: Tensor, packed: OneDNNWeight) -> Tensor:
    """uint8 [rows, in] -> (x - 128) @ q^T * scales, float32 [rows, out]."""
    result: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, ZERO_POINT, packed.weight, packed.scales, packed.zero_points,
        None, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return result


@functools.cache
def is_exact() -> bool:
    """Return whether this build has the op, and its sums are exact where saturating instructions would not be."""
    signs = torch.tensor([1, 1, -1]).repeat(33)[None, :67]
    weight = Int8Weight((127 * signs).expand(16, -1).to(torch.int8).contiguous(), torch.ones(16, 1))
    levels = torch.cat((127 * signs, -127 * signs, 127 * torch.ones_like(signs)))
    expected = (levels @ weight.weight.long().t()).float()
    try:
        packed = OneDNN().pack(weight)
        actual = _matmul((levels + ZERO_POINT).to(torch.uint8), packed)
        restored = OneDNN().unpack(packed).weight
    except (RuntimeError, AttributeError):
        return False
    return torch.equal(actual, expected) and torch.equal(restored, weight.weight)
