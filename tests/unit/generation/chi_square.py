"""Pearson's test at a level of one in a thousand."""

from __future__ import annotations

import math
from collections.abc import Sequence


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> float:
    assert min(expected) >= 5, "the test needs larger cells"
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))


def critical(degrees: int) -> float:
    """What the statistic stays below in 999 of 1000 cases (Wilson and Hilferty 1931, within 2 % from 1 degree on)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.0902 * math.sqrt(2 / (9 * degrees))) ** 3
