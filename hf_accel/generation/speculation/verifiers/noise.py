"""Random numbers that are functions of a seed, a position and a purpose.

They have no state, so a sequence's numbers depend neither on the batch and its order nor on preemption. They are made
by three rounds of the SplitMix64 finalizer (Steele, Lea, Flood 2014) over seed, position and purpose. All operations
are on integers, so the bits are the same on every machine.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio; SplitMix64 adds it at each step
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """The use of a random number. Numbers of different purposes are independent."""

    DRAFT = 0  # to draw a drafted token
    ACCEPT = 1  # to decide whether a drafted token is accepted
    TARGET = 2  # to draw the model's own token after the accepted ones
    RACE = 3  # to make one number for each token of the vocabulary


def uniform(seed: int, position: int, purpose: int, offset: int = 0) -> float:
    """Return a number in [0, 1) with 53 bits.

    seed: any integer; its lowest 64 bits are used. offset: numbers of the same position with different offsets are
    independent (see Place.offset).
    """
    return (_bits(seed, position, purpose, offset) >> 11) * 2.0**-53


def race_key(seed: int, position: int) -> int:
    """Return the key, an int64, from which `exponentials` makes a number for each token of the vocabulary."""
    bits = _bits(seed, position, Purpose.RACE, 0)
    return bits - (1 << 64) if bits >> 63 else bits


def exponentials(keys: Tensor, ids: Tensor) -> Tensor:
    """Return exponentially distributed numbers with mean 1, float64, all above 0.

    keys, ids: int64 keys (see race_key) and token ids, of shapes that broadcast.
    """
    bits = keys + (ids + 1).mul_(_signed(GAMMA))
    for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
        bits = bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    return _shifted(bits, 11).double().add_(0.5).mul_(2.0**-53).log_().neg_()


def gumbel(seed: int, position: int, size: int) -> Tensor:
    """Return standard Gumbel numbers for the token ids 0..size-1, [size] float64.

    argmax(log p + gumbel) has the distribution p (the Gumbel-max trick).
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
    """Shift right and fill with zeros. (torch's own shift fills with the sign bit.)"""
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
