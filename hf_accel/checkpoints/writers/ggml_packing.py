"""Quantized weights in llama.cpp's blocks of 32: Q8_0, Q4_0 and Q4_1, as ggml_blocks.py reads them.

Source: ggml, `block_q8_0`, `block_q4_0` and `block_q4_1` in ggml-common.h. A scale of ours is for at least as many
inputs as a block holds, so the integers go over as they are; each scale is rounded to float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...linear.formats import ByteWeight, LowBitWeight, QuantizedWeight

BLOCK = 32


def ggml_type_of(weight: QuantizedWeight) -> str | None:
    """The name of the blocks that hold a weight [out, in]; None if there are none for its shape and scales."""
    if (
        weight.format != "int"
        or weight.shape[1] % BLOCK
        or weight.group_size % BLOCK
        or weight.input_order is not None
    ):
        return None
    if weight.weight_scale.abs().max() > torch.finfo(torch.float16).max:
        return None
    if weight.bits == 8:
        return "Q8_0" if weight.symmetric else None
    return "Q4_0" if weight.symmetric else "Q4_1"


def blocks(weight: QuantizedWeight, rows: Tensor | None = None) -> Tensor:
    """uint8 [out, in / 32 * bytes of a block]. rows: the order of the outputs, int64 [out]."""
    order = slice(None) if rows is None else rows
    integers, scale = weight.integers()[order], weight.weight_scale[order]
    out_features, in_features = integers.shape
    repeats = in_features // BLOCK // scale.shape[1]
    values = integers.reshape(-1, BLOCK)
    factor = scale.repeat_interleave(repeats, dim=1).reshape(-1, 1)
    if isinstance(weight, ByteWeight):
        parts = [_half(factor), values.view(torch.uint8)]
    else:
        # Q4_0 takes 8 off; what is added in Q4_1 is the smaller, and the more exact in float16, the lower its levels.
        nibbles = (values + (8 if weight.symmetric else 1 << weight.bits - 1)).view(torch.uint8)
        packed = nibbles[:, : BLOCK // 2] | nibbles[:, BLOCK // 2 :] << 4
        parts = [_half(factor), packed]
        if isinstance(weight, LowBitWeight) and not weight.symmetric:
            parts.insert(1, _half(_shift(weight)[order].repeat_interleave(repeats, dim=1).reshape(-1, 1)))
    return torch.cat(parts, dim=1).reshape(out_features, -1)


def _shift(weight: LowBitWeight) -> Tensor:
    """[out, groups]: what is added to (q + 2^(bits - 1)) * scale."""
    if weight.weight_minimum is not None:
        return -weight.weight_minimum
    zero_point = weight.zero_points()
    assert zero_point is not None
    return (zero_point.float() + (1 << weight.bits - 1)) * -weight.weight_scale.float()


def _half(column: Tensor) -> Tensor:
    """[n, 1] in float16 as bytes [n, 2]."""
    return column.to(torch.float16).contiguous().view(torch.uint8)


def rounding_of_scales(weight: QuantizedWeight) -> float:
    """Return the largest change of a scale, or of an offset, by float16, as a share of it."""
    added = [_shift(weight)] if isinstance(weight, LowBitWeight) and not weight.symmetric else []
    return max(_rounding(numbers.double()) for numbers in (weight.weight_scale, *added))


def _rounding(numbers: Tensor) -> float:
    change = (numbers.to(torch.float16).double() - numbers).abs()
    return float((change / numbers.abs().clamp(min=torch.finfo(torch.float64).tiny)).max())
