"""Weights in llama.cpp's blocks, as our formats: the same numbers, where one of ours can hold them.

Source of the layouts: ggml-quants.h and ggml-quants.c of llama.cpp. A row of a weight is a sequence of blocks of 32 or
256 consecutive inputs. d is a half-precision scale of the block; in "K" blocks, pieces of 16 or 32 inputs have integer
scales of their own, times d.

    Q8_0  q * d      Q4_0  (q - 8) * d      Q5_0  (q - 16) * d      Q4_1, Q5_1  q * d + m
    Q3_K  (q - 4) * (d * s)     Q6_K  (q - 32) * (d * s)     Q2_K, Q4_K, Q5_K  q * (d * s) - (dmin * t)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...linear import Int4Weight, Int8Weight, QuantizedWeight
from ...linear.formats import Layout


@dataclass(frozen=True)
class BlockType:
    """inputs, bytes: of a block. decode: blocks uint8 [out, blocks, bytes] -> the weight."""

    name: str
    inputs: int
    bytes: int
    layout: Layout
    decode: Callable[[Tensor], QuantizedWeight]

    def weight(self, blocks: Tensor) -> QuantizedWeight:
        """Return the weight of rows of blocks, uint8 [out, in / inputs * bytes]."""
        return self.decode(blocks.view(len(blocks), -1, self.bytes))


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the half-precision number that begins at a byte of each block: float16 [out, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack uint8 [..., n] -> [..., 2 n]: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _signed(levels: Tensor, middle: int) -> Tensor:
    """Center uint8 [out, ...] -> int8 [out, in], level - middle."""
    return levels.flatten(1).view(torch.int8).sub(middle)


def _int4(levels: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Int4Weight:
    weight = Int4Weight.from_integers(_signed(levels, 8), scale)
    return Int4Weight(weight.weight_packed, scale, weight.weight_shape, None, minimum)


def _q8_0(blocks: Tensor) -> Int8Weight:
    return Int8Weight(blocks[..., 2:].flatten(1).view(torch.int8), _halves(blocks, 0))


def _q4_0(blocks: Tensor) -> Int4Weight:
    return _int4(_nibbles(blocks[..., 2:]), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Int4Weight:
    return _int4(_nibbles(blocks[..., 4:]), _halves(blocks, 0), -_halves(blocks, 2))


def _bits(packed: Tensor) -> Tensor:
    """Unpack uint8 [..., n] -> [..., 8 n] of 0 and 1, the lowest bit first."""
    place = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> place & 1).flatten(-2)


def _q5_0(blocks: Tensor) -> Int8Weight:
    levels = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return Int8Weight(_signed(levels, 16), _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Int8Weight:
    levels = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return Int8Weight(_signed(levels, 0), _halves(blocks, 0), None, -_halves(blocks, 2))


def _q2_k(blocks: Tensor) -> Int4Weight:
    """Decode scales and minima of 4 bits for 16 inputs, and bytes of 4 levels that lie 32 inputs apart."""
    scales, packed = blocks[..., :16], blocks[..., 16:80].unflatten(-1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    scale, minimum = _times(scales & 15, _halves(blocks, 80)), _times(scales >> 4, _halves(blocks, 82))
    return _int4((packed >> shifts & 3).flatten(-3), scale, minimum)


def _q3_k(blocks: Tensor) -> Int4Weight:
    """Decode levels as in Q2_K, with a third bit each, and scales of 6 bits for 16 inputs."""
    high, packed, scales = blocks[..., :32], blocks[..., 32:96].unflatten(-1, (2, 1, 32)), blocks[..., 96:108]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    third = high.unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1) & 1
    levels = (packed >> shifts & 3).flatten(-3) | third.flatten(-2) << 2
    two = torch.cat([scales[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    six = torch.cat((scales[..., :8] & 15, scales[..., :8] >> 4), dim=-1) | two << 4
    scale = _times(six.view(torch.int8) - 32, _halves(blocks, 108))
    return Int4Weight.from_integers(_signed(levels, 4), scale)


def _k_factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Decode the scales and minima of Q4_K and Q5_K, 6 bits for each of 8 pieces."""
    packed = blocks[..., 4:16]
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=-1)
    return _times(scales, _halves(blocks, 0)), _times(minima, _halves(blocks, 2))


def _q4_k(blocks: Tensor) -> Int4Weight:
    return _int4(_nibbles(blocks[..., 16:].unflatten(-1, (4, 32))), *_k_factors(blocks))  # pieces in pairs


def _q5_k(blocks: Tensor) -> Int8Weight:
    levels = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    pieces = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> pieces & 1).flatten(-2)  # a bit for each piece
    scale, minimum = _k_factors(blocks)
    return Int8Weight(_signed(levels | fifth << 4, 0), scale, None, minimum)


def _q6_k(blocks: Tensor) -> Int8Weight:
    low = blocks[..., :128].unflatten(-1, (2, 64))  # of two runs of 128 inputs
    high = blocks[..., 128:192].unflatten(-1, (2, 32))
    pieces = [
        (low[..., :32] & 15) | (high & 3) << 4,
        (low[..., 32:] & 15) | (high >> 2 & 3) << 4,
        (low[..., :32] >> 4) | (high >> 4 & 3) << 4,
        (low[..., 32:] >> 4) | (high >> 6) << 4,
    ]
    scales = blocks[..., 192:208].contiguous().view(torch.int8)  # one for 16 inputs
    return Int8Weight(_signed(torch.cat(pieces, dim=-1), 32), _times(scales, _halves(blocks, 208)))


def _times(integers: Tensor, factor: Tensor) -> Tensor:
    """Multiply integers [out, blocks, pieces] by the number of each block: exact, float32 [out, groups]."""
    return (integers.float() * factor.float().unsqueeze(-1)).flatten(1)


def _layout(bits: int, group_size: int, scale_dtype: torch.dtype, *, minima: bool = False) -> Layout:
    return Layout(
        bits=bits, group_size=group_size, symmetric=not minima, minima=minima, scale_dtype=scale_dtype
    )  # fmt: skip


HALF, SINGLE = torch.float16, torch.float32
TYPES = {
    kind.name: kind
    for kind in (
        BlockType("Q8_0", 32, 34, _layout(8, 32, HALF), _q8_0),
        BlockType("Q4_0", 32, 18, _layout(4, 32, HALF), _q4_0),
        BlockType("Q4_1", 32, 20, _layout(4, 32, HALF, minima=True), _q4_1),
        BlockType("Q5_0", 32, 22, _layout(8, 32, HALF), _q5_0),
        BlockType("Q5_1", 32, 24, _layout(8, 32, HALF, minima=True), _q5_1),
        BlockType("Q2_K", 256, 84, _layout(4, 16, SINGLE, minima=True), _q2_k),
        BlockType("Q3_K", 256, 110, _layout(4, 16, SINGLE), _q3_k),
        BlockType("Q4_K", 256, 144, _layout(4, 32, SINGLE, minima=True), _q4_k),
        BlockType("Q5_K", 256, 176, _layout(8, 32, SINGLE, minima=True), _q5_k),
        BlockType("Q6_K", 256, 210, _layout(8, 16, SINGLE), _q6_k),
    )
}
