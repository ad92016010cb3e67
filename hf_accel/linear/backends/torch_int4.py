"""INT4 weights times bfloat16 activations through torch's own kernel.

Source of the packed layout: aten/src/ATen/native/cpu/int4mm_kernel.cpp; checked before it is relied on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import GROUP_SIZES
from ..formats import Int4Weight, QuantizedWeight, chunks, scaled
from .backend import Backend, LinearSpec

FEW_ROWS = 48  # beyond, dequantizing once costs less than reading nibbles for every few rows
MULTIPLE = 16  # the kernel takes whole vectors of outputs
BLOCKS = (64, 32)  # outputs packed together, on AVX-512 and on AVX2


@dataclass(frozen=True, eq=False)
class TorchInt4Weight:
    weight: Tensor  # uint8 [out, in / 2], in the kernel's order
    scales_and_zeros: Tensor  # bfloat16 [groups, out, 2]
    weight_scale: Tensor  # [out, groups], as stored

    @property
    def group_size(self) -> int:
        return 2 * self.weight.shape[1] // self.weight_scale.shape[1]


class TorchInt4(Backend):
    """Multiplies in bfloat16; many rows dequantize the weight in chunks and use torch's matmul."""

    name = "torch"
    layouts = ("int4",)
    device_types = ("cpu",)
    dtypes = (torch.bfloat16, torch.float32)

    def refuses(self, spec: LinearSpec) -> str | None:
        reason = super().refuses(spec)
        if reason is not None:
            return reason
        if not spec.layout.symmetric:
            return "it takes symmetric weights only"
        if spec.layout.group_size not in GROUP_SIZES:
            return f"it takes groups of {', '.join(map(str, GROUP_SIZES))} inputs, not {spec.layout.group_size}"
        if spec.out_features % MULTIPLE:
            return f"it needs outputs in multiples of {MULTIPLE}, not {spec.out_features}"
        return None if block_size() else "torch's INT4 matmul is not available in this build"

    def note(self, spec: LinearSpec) -> str | None:
        if spec.dtype == torch.bfloat16:
            return None
        return f"up to {FEW_ROWS} rows are multiplied with inputs and scales rounded to bfloat16"

    def pack(self, weight: QuantizedWeight) -> TorchInt4Weight:
        assert isinstance(weight, Int4Weight)
        scale = weight.weight_scale.t().to(torch.bfloat16)
        scales_and_zeros = torch.stack((scale, torch.zeros_like(scale)), dim=-1)
        stored = weight.weight_scale
        if stored.dtype == torch.bfloat16:
            stored = scales_and_zeros[..., 0].t()  # the same numbers, held once
        return TorchInt4Weight(_pack(weight.integers()), scales_and_zeros, stored)

    def unpack(self, packed: TorchInt4Weight) -> Int4Weight:
        pieces = [_unpack(packed.weight[o], block_size()) for o in chunks(len(packed.weight))]
        return Int4Weight.from_integers(torch.cat(pieces), packed.weight_scale.contiguous())

    def run(self, x: Tensor, packed: TorchInt4Weight, bias: Tensor | None) -> Tensor:
        out = _few_rows(x, packed) if len(x) <= FEW_ROWS else _many_rows(x, packed)
        return out if bias is None else out + bias


def _few_rows(x: Tensor, packed: TorchInt4Weight) -> Tensor:
    inputs = x.to(torch.bfloat16)
    out = torch._weight_int4pack_mm_for_cpu(inputs, packed.weight, packed.group_size, packed.scales_and_zeros)
    return out.to(x.dtype)


def _many_rows(x: Tensor, packed: TorchInt4Weight) -> Tensor:
    out = x.new_empty(len(x), len(packed.weight))
    for outputs in chunks(len(packed.weight)):
        scale = packed.weight_scale[outputs].contiguous().unsqueeze(-1)  # a strided one takes three times as long
        groups = _unpack(packed.weight[outputs], block_size()).view(*scale.shape[:2], packed.group_size)
        out[:, outputs] = F.linear(x, scaled(groups, scale, x.dtype).flatten(-2))
    return out


def _pack(integers: Tensor) -> Tensor:
    """int8 [out, in] of -8..7 -> uint8 [out, in / 2] in the kernel's order."""
    return torch._convert_weight_to_int4pack_for_cpu(integers.int() + 8, 1)


def _unpack(packed: Tensor, block: int) -> Tensor:
    """uint8 [out, in / 2] in the kernel's order, from the start of a block -> int8 [out, in].

    A whole block holds, input by input, its first half of outputs in low nibbles and its second half
    in high ones; the outputs left over are held in pairs of neighbours.
    """
    out_features, in_features = packed.shape[0], 2 * packed.shape[1]
    signed = (packed ^ 0x88).view(torch.int8)  # q + 8 -> two's complement, in both nibbles
    whole = out_features - out_features % block
    halves = signed[:whole].view(whole // block, in_features, block // 2).transpose(1, 2).contiguous()
    pairs = signed[whole:].view(in_features, (out_features - whole) // 2).t()
    return torch.cat(
        (
            torch.cat((halves << 4 >> 4, halves >> 4), dim=1).view(whole, in_features),
            torch.stack((pairs << 4 >> 4, pairs >> 4), dim=1).flatten(0, 1),
        )
    )


@functools.cache
def block_size() -> int:
    """Outputs in a packed block on this machine; 0 if the op is missing or packs in another way."""
    sizes = range(MULTIPLE, 2 * max(BLOCKS) + 1, MULTIPLE)
    probes = [torch.arange(out * 32).mul(7).remainder(13).sub(8).add(torch.arange(out * 32) % 3) for out in sizes]
    weights = [probe.view(-1, 32).to(torch.int8) for probe in probes]
    try:
        packed = [_pack(weight) for weight in weights]
    except (RuntimeError, AttributeError):
        return 0
    for block in BLOCKS:
        if all(torch.equal(_unpack(p, block), w) for p, w in zip(packed, weights, strict=True)):
            return block
    return 0
