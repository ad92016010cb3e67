"""Integers of few bits in words of 32, the first in the lowest bits."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

WORD = 32  # bits of an int32; as many integers of b bits take b words


def unit_of(bits: int) -> tuple[int, int]:
    """The fewest integers that fill whole words, and those words."""
    words = bits // math.gcd(bits, WORD)
    return WORD * words // bits, words


def pack_zero_points(zero_point: Tensor, bits: int = 4) -> Tensor:
    """int8 [out, groups], less 2^(bits - 1) -> int32 [words of out, groups]."""
    padded = F.pad(zero_point, (0, 0, 0, -len(zero_point) % unit_of(bits)[0]), value=-(1 << bits - 1))
    return to_words(padded.t().contiguous(), bits).t().contiguous()


def to_words(integers: Tensor, bits: int) -> Tensor:
    """int8 [rows, n], less 2^(bits - 1) -> int32 [rows, n * bits / 32], the first integer in the lowest bits."""
    rows, columns = integers.shape
    unsigned = (integers + (1 << bits - 1)).view(torch.uint8)
    if bits == 4:
        stored = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    else:
        single = unsigned.unsqueeze(-1) >> _places(bits, integers.device) & 1
        stored = (single.view(rows, -1, 8) << _places(8, integers.device)).sum(-1, dtype=torch.uint8)
    return stored.flatten().view(torch.int32).view(rows, columns * bits // WORD)  # one row may have any stride


def unpack_words(words: Tensor, bits: int = 4) -> Tensor:
    """int32 [rows, n * bits / 32] -> int8 [rows, n]: each `bits` bits less 2^(bits - 1), the lowest first."""
    rows, columns = words.shape
    stored = words.flatten().view(torch.uint8)
    if bits == 4:
        unsigned = torch.stack((stored & 15, stored >> 4), dim=-1)
    else:
        single = stored.unsqueeze(-1) >> _places(8, words.device) & 1
        unsigned = (single.view(-1, bits) << _places(bits, words.device)).sum(-1, dtype=torch.uint8)
    return unsigned.view(torch.int8).sub_(1 << bits - 1).view(rows, columns * WORD // bits)


def _places(bits: int, device: torch.device) -> Tensor:
    return torch.arange(bits, dtype=torch.uint8, device=device)


def zero_point_bytes(out_features: int, groups: int, bits: int = 4) -> int:
    """Bytes of a stored weight_zero_point."""
    whole, words = unit_of(bits)
    return -(-out_features // whole) * words * groups * 4
