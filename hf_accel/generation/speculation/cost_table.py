"""The time of a model's pass as a function of its number of rows, learnt from the passes that ran."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median_low

NUM_MEDIAN = 5  # the estimate of a width is the median of so many first observations; later ones move it
MIN_WEIGHT = 0.05  # the smallest weight of a new observation in the moving average
CLIP = 1.5  # an observation counts as at most so many times the estimate, or as the estimate divided by this
# Beyond the measured widths, a further row is assumed to add the share FLAT of the pass's time, or SHARE times the
# mean time of a row, whichever is less.
FLAT = 0.05
SHARE = 0.5
# Two observations may both be outliers. So with at most FEW observations, the estimate of a width is at most MAX_JUMP
# times the expected time.
FEW = 2
MAX_JUMP = 2.0
NOISE = 0.1  # the assumed mean relative deviation of an observation before any was seen


@dataclass
class Width:
    """The measured time of passes with one number of rows. expected: the seconds estimated before any was seen."""

    expected: float = inf
    first: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_MEDIAN))
    seconds: float = 0.0
    count: int = 0

    def observe(self, seconds: float) -> None:
        self.count += 1
        if self.count <= NUM_MEDIAN:
            self.first.append(seconds)
            self.seconds = median_low(self.first)  # the lower median, because outliers are slow
            if self.count <= FEW:
                self.seconds = min(self.seconds, MAX_JUMP * self.expected)
        else:
            clipped = min(max(seconds, self.seconds / CLIP), self.seconds * CLIP)
            self.seconds += max(MIN_WEIGHT, 1 / self.count) * (clipped - self.seconds)


class CostTable:
    """The seconds of a pass as a function of its rows, which never falls. A width is a measured number of rows.

    The estimate of a width is the median of its first observations, and then a moving average of clipped ones, so
    that neither noise nor an outlier moves it far. Its first observations count at most MAX_JUMP times the time that
    its neighbours let expect. If more rows took less time, the estimates are averaged (isotonic regression). Between
    widths the function is linear. Beyond the largest width it rises slowly, even if it rose fast before, because the
    time of kernels has steps (one row is often a special case). A width that looks cheap is tried and so measured; a
    width that looks expensive would never be.
    """

    def __init__(self) -> None:
        self.widths: dict[int, Width] = {}
        self.noise = NOISE
        self._deviations = 0
        self._curve: tuple[list[int], list[float]] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        if rows < 1 or not seconds > 0:
            return
        # Large passes are rounded to fewer widths, because similar numbers of rows cost the same.
        step = 1 << max(0, rows.bit_length() - 6)
        rows = round(rows / step) * step
        if rows not in self.widths:
            self.widths[rows] = Width(self.seconds(rows) if self.widths else inf)
        width = self.widths[rows]
        if width.count > FEW:
            deviation = min(abs(seconds / width.seconds - 1), CLIP - 1)
            self._deviations += 1
            self.noise += max(MIN_WEIGHT, 1 / (self._deviations + FEW)) * (deviation - self.noise)
        width.observe(seconds)
        self._curve = None

    def is_measured(self, rows: int) -> bool:
        """Return whether two or more passes with half to twice as many rows were seen. (The first is often slow.)"""
        near = (width.count for seen, width in self.widths.items() if rows <= 2 * seen and seen <= 2 * rows)
        return sum(near) >= 2

    def uncertainty(self, rows: int) -> float:
        """The relative standard error of `seconds(rows)`."""
        nearest = min(self.widths, key=lambda seen: abs(seen - rows))
        return self.noise / sqrt(min(self.widths[nearest].count, 1 / MIN_WEIGHT))

    def curve(self) -> tuple[list[int], list[float]]:
        """The measured widths in order, and the seconds of each."""
        if self._curve is None:
            rows = sorted(self.widths)
            seen = [self.widths[n] for n in rows]
            self._curve = rows, isotonic([w.seconds for w in seen], [min(w.count, 1 / MIN_WEIGHT) for w in seen])
        return self._curve

    def seconds(self, rows: int) -> float:
        """The estimated seconds of a pass; 0 for no rows. Raises LookupError before the first pass was observed."""
        if rows == 0:
            return 0.0
        widths, seconds = self.curve()
        if not widths:
            raise LookupError("no pass was observed yet")
        at = bisect_left(widths, rows)
        if at == len(widths):
            return seconds[-1] + (rows - widths[-1]) * self._slope_beyond()
        if widths[at] == rows:
            return seconds[at]
        if at == 0:
            return seconds[0] * (1 - (widths[0] - rows) * min(FLAT, SHARE / widths[0]))
        part = (rows - widths[at - 1]) / (widths[at] - widths[at - 1])
        return seconds[at - 1] + part * (seconds[at] - seconds[at - 1])

    def _slope_beyond(self) -> float:
        widths, seconds = self.curve()
        assumed = seconds[-1] * min(FLAT, SHARE / widths[-1])
        if len(widths) == 1:
            return assumed
        last = (seconds[-1] - seconds[-2]) / (widths[-1] - widths[-2])
        return max(assumed, last / 4) if last > assumed else max(last, assumed / 4)

    def to_dict(self) -> dict[str, float]:
        """Return the seconds by width. The result can be written as JSON."""
        widths, seconds = self.curve()
        return {str(n): s for n, s in zip(widths, seconds, strict=True)}


def isotonic(values: list[float], weights: list[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to `values` in weighted least squares (pool adjacent violators)."""
    pools: list[list[float]] = []  # value, weight, count
    for value, weight in zip(values, weights, strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            value, weight, count = pools.pop()
            before = pools[-1]
            before[0] = (before[0] * before[1] + value * weight) / (before[1] + weight)
            before[1] += weight
            before[2] += count
    return [value for value, _, count in pools for _ in range(int(count))]
