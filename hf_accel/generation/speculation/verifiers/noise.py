"""Random numbers that are functions of where they are needed: of a seed, a position and a purpose.

Nothing is remembered between calls, so neither the batch, its order nor a preemption changes a sequence's numbers.
Three rounds of the SplitMix64 finalizer (Steele, Lea, Flood 2014) over seed, position and purpose; integers only, so
the bits are the same on every machine.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: what SplitMix64 adds for each step
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a number is for. Numbers of different purposes are independent."""

    DRAFT = 0  # draws a drafted token
    ACCEPT = 1  # decides whether a drafted token stays
    TARGET = 2  # draws the token that a pass adds itself
    RACE = 3  # one number for each token of the vocabulary


def uniform(seed: int, position: int, purpose: int, offset: int = 0) -> float:
    """A number in [0, 1) with 53 bits. seed: any integer, of which 64 bits count. offset: tells apart numbers for the
    same position that must be independent (Place.offset)."""
    return (_bits(seed, position, purpose, offset) >> 11) * 2.0**-53


def race_key(seed: int, position: int) -> int:
    """What `exponentials` makes a number for each token of the vocabulary from; an int64."""
    bits = _bits(seed, position, Purpose.RACE, 0)
    return bits - (1 << 64) if bits >> 63 else bits


def exponentials(keys: Tensor, ids: Tensor) -> Tensor:
    """Exponentially distributed numbers (mean 1) for token ids: int64, shapes that broadcast -> float64, above 0."""
    bits = keys + (ids + 1).mul_(_signed(GAMMA))
    for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
        bits = bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    return _shifted(bits, 11).double().add_(0.5).mul_(2.0**-53).log_().neg_()


def gumbel(seed: int, position: int, size: int) -> Tensor:
    """Standard Gumbel numbers for the token ids 0..size-1 -> float64 [size].

    argmax(log p + gumbel) has the distribution p.
    """
    key = torch.tensor(race_key(seed, position))
    return exponentials(key, torch.arange(size)).log_().neg_()


def _bits(seed: int, position: int, purpose: int, offset: int) -> int:
    bits = _mix((seed + GAMMA) & MASK)
    bits = _mix((bits + (position + 1) * GAMMA) & MASK)
    return _mix((bits + (len(Purpose) * offset + purpose + 1) * GAMMA) & MASK)


def _mix(bits: int) -> int:
    bits = ((bits ^ (bits >> SHIFTS[0])) * FACTORS[0]) & MASK
    bits = ((bits ^ (bits >> SHIFTS[1])) * FACTORS[1]) & MASK
    return bits ^ (bits >> SHIFTS[2])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Logical shift to the right: torch's own repeats the sign."""
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
