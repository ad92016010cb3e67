"""Draws tokens from rows of logits, or of probabilities, by random numbers that the caller gives."""

from __future__ import annotations

from ctypes import Structure
from dataclasses import dataclass

import torch
from torch import Tensor

from .library import DTYPES, fields, kernel, threads

# Draw in kernels.h
LIKELIEST, RACE, INVERSE = range(3)


class DrawCall(Structure):
    _fields_ = fields(
        pointers="rows ids numbers tokens confidences probabilities",
        sizes="stride num_rows size k probability_stride top_k", floats="temperature top_p",
        ints="kind is_weights dtype threads",
    )  # fmt: skip


_draw = kernel("draw", DrawCall)


@dataclass(frozen=True)
class Draws:
    """A way to draw tokens from logits.

    kind: LIKELIEST; RACE, whose winner has the smallest quotient of an exponential number and its probability; or
    INVERSE, the first token at which the sum of probabilities exceeds a number. temperature, top_k, top_p: as in
    generate(), top_k 0 for all tokens.
    """

    kind: int = LIKELIEST
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def numbers(self, numbers: list[int] | list[float]) -> Tensor | None:
        """Return what draws are made with: int64 keys for a race, or float64 numbers in [0, 1)."""
        if self.kind == LIKELIEST:
            return None
        return torch.tensor(numbers, dtype=torch.int64 if self.kind == RACE else torch.float64)


LIKELIEST_DRAWS = Draws()


def drawn_from(weights: Tensor, draws: Draws, numbers: Tensor) -> Tensor:
    """Draw from each row of weights [n, V] float32, which need not sum to 1. Returns [n] int64; -1 without weights.

    numbers: see Draws.numbers. The temperature, top_k and top_p are not applied.
    """
    weights = weights if weights.stride(-1) == 1 else weights.contiguous()
    tokens = torch.empty(len(weights), dtype=torch.int64)
    _draw(
        weights.data_ptr(), 0, numbers.data_ptr(), tokens.data_ptr(), 0, 0,
        weights.stride(0), len(weights), weights.shape[1], 1, 0, 0, 1.0, 1.0,
        draws.kind, 1, DTYPES[weights.dtype], threads(),
    )  # fmt: skip
    return tokens


def drawn(logits: Tensor, draws: Draws, numbers: Tensor | None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from each row of logits [n, V]. numbers: see Draws.numbers.

    Returns the first k tokens of each row, [n, k] int64 (-1 where there are fewer); the logarithms of how likely each
    is to be the first, [n, k] float32; and, for INVERSE alone, the probabilities that were drawn from, [n, V] float32.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    count, size = logits.shape
    tokens, confidences = torch.empty(count, k, dtype=torch.int64), torch.empty(count, k)
    probabilities = torch.zeros(count if draws.kind == INVERSE else 0, size)
    _draw(
        logits.data_ptr(), 0, 0 if numbers is None else numbers.data_ptr(), tokens.data_ptr(), confidences.data_ptr(),
        probabilities.data_ptr(), logits.stride(0), count, size, k, size, draws.top_k, draws.temperature, draws.top_p,
        draws.kind, 0, DTYPES[logits.dtype], threads(),
    )  # fmt: skip
    return tokens, confidences, probabilities
