"""The objective of a student's training, and the sums of a batch's losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...errors import UnsupportedError

LOSSES = ("fkl", "rkl", "jsd", "tv", "nla", "lk")


@dataclass(frozen=True)
class Objective:
    """L = alpha * CE + (1 - alpha) * T^2 * D(teacher, student), both softened by the temperature T (Hinton et al.
    1503.02531). alpha=1 is plain training.

    loss: "fkl" KL(t|s), "rkl" KL(s|t), "jsd" beta * KL(t|m) + (1 - beta) * KL(s|m) with m = beta * t + (1 - beta) * s
    (2306.13649), "tv" half the L1 distance, "nla" -log(1 - tv), minus the log of the chance that a draft is accepted,
    "lk" lambda * fkl + (1 - lambda) * tv with lambda = exp(-eta * acceptance) (2602.23881).
    """

    alpha: float = 0.5
    temperature: float = 2.0
    loss: str = "fkl"
    beta: float = 0.5
    eta: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UnsupportedError(f"alpha={self.alpha}: the share of the labels is from 0 to 1")
        if not self.temperature > 0 or self.temperature == float("inf"):
            raise UnsupportedError(f"temperature={self.temperature}: softening needs a finite number above 0")
        if self.loss not in LOSSES:
            raise UnsupportedError(f"loss={self.loss!r} is not known; there are {', '.join(LOSSES)}")
        if not 0 < self.beta < 1:
            raise UnsupportedError(f"beta={self.beta}: above 0 and below 1; the ends are loss='fkl' and loss='rkl'")
        if not self.eta >= 0:
            raise UnsupportedError(f"eta={self.eta}: 0 or more")


class Sums(NamedTuple):
    """Scalars, float32 (float64 where the student's numbers are float64).

    total: alpha * ce + (1 - alpha) * kd, differentiable. ce: the sum of cross entropies. kd: T^2 times the sum of D.
    ce and kd carry no gradient.
    """

    total: Tensor
    ce: Tensor
    kd: Tensor


def mean(total: Tensor, count: int, num_items: Tensor | int | None) -> Tensor:
    """total / num_items, or total / count where num_items is None."""
    if num_items is None:
        return total / max(1, count)
    if isinstance(num_items, int) and num_items < 1:
        raise UnsupportedError(f"num_items={num_items}: the sum is divided by it; 1 or more, or None for the mean")
    return total / num_items
