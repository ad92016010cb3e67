"""How long a pass of a model takes, by the number of its rows, learnt from the passes that ran."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median_low

FIRST = 5  # observations of a width whose median is its estimate; later ones move it
FORGET = 0.05  # how far at most one later observation moves it
CLIP = 1.5  # an observation counts as at most this much over or under the estimate
# Beyond what was seen, a row is taken to cost FLAT of the pass, or SHARE of a row's share of it, whichever is less.
FLAT = 0.05
SHARE = 0.5
# Two observations may both be outliers. Until there are more than FEW, a width is not taken to cost more than
# MOST_JUMP times what was expected.
FEW = 2
MOST_JUMP = 2.0
NOISE = 0.1  # mean relative deviation of an observation, before any was seen


@dataclass
class Width:
    """What is known of passes over one number of rows. expected: seconds, before any was seen."""

    expected: float = inf
    first: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST))
    seconds: float = 0.0
    count: int = 0

    def observe(self, seconds: float) -> None:
        self.count += 1
        if self.count <= FIRST:
            self.first.append(seconds)
            self.seconds = median_low(self.first)  # outliers are slow ones
            if self.count <= FEW:
                self.seconds = min(self.seconds, MOST_JUMP * self.expected)
        else:
            clipped = min(max(seconds, self.seconds / CLIP), self.seconds * CLIP)
            self.seconds += max(FORGET, 1 / self.count) * (clipped - self.seconds)


class CostTable:
    """Seconds over rows: a curve that never falls, through what was measured at each width.

    Each width keeps the median of its first observations and then a moving average of clipped ones, so that neither
    noise nor an outlier moves it far; at first it is not believed to be much dearer than its neighbours promise.
    Where more rows were measured to take less, the two are averaged by their counts (isotonic regression). Between
    widths it is linear. Beyond the widest it rises little, even where it rose much before: kernels have steps (one row
    is often a case of its own), and a width that looks cheap gets tried and is then known, while one that looks dear
    never would be.
    """

    def __init__(self) -> None:
        self.widths: dict[int, Width] = {}
        self.noise = NOISE
        self._deviations = 0
        self._curve: tuple[list[int], list[float]] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        if rows < 1 or not seconds > 0:
            return
        step = 1 << max(0, rows.bit_length() - 6)  # wide passes cost what their neighbours do: a few widths will do
        rows = round(rows / step) * step
        if rows not in self.widths:
            self.widths[rows] = Width(self.seconds(rows) if self.widths else inf)
        width = self.widths[rows]
        if width.count > FEW:
            deviation = min(abs(seconds / width.seconds - 1), CLIP - 1)
            self._deviations += 1
            self.noise += max(FORGET, 1 / (self._deviations + FEW)) * (deviation - self.noise)
        width.observe(seconds)
        self._curve = None

    def knows(self, rows: int) -> bool:
        """Whether widths near enough to tell what this one costs were seen, twice: the first pass is often slow."""
        near = (width.count for seen, width in self.widths.items() if rows <= 2 * seen and seen <= 2 * rows)
        return sum(near) >= 2

    def uncertainty(self, rows: int) -> float:
        """Relative standard error of the seconds of a pass over so many rows."""
        nearest = min(self.widths, key=lambda seen: abs(seen - rows))
        return self.noise / sqrt(min(self.widths[nearest].count, 1 / FORGET))

    def curve(self) -> tuple[list[int], list[float]]:
        """The widths seen, in order, and the seconds of each."""
        if self._curve is None:
            rows = sorted(self.widths)
            seen = [self.widths[n] for n in rows]
            self._curve = rows, isotonic([w.seconds for w in seen], [min(w.count, 1 / FORGET) for w in seen])
        return self._curve

    def seconds(self, rows: int) -> float:
        """Of a pass over so many rows; 0 for none. Raises LookupError as long as no pass was seen."""
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
        """JSON-able: seconds by width."""
        widths, seconds = self.curve()
        return {str(n): s for n, s in zip(widths, seconds, strict=True)}


def isotonic(values: list[float], weights: list[float]) -> list[float]:
    """The nearest sequence, in weighted squares, that never falls: pool adjacent violators."""
    pools: list[list[float]] = []  # value, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            value, weight, count = pools.pop()
            before = pools[-1]
            before[0] = (before[0] * before[1] + value * weight) / (before[1] + weight)
            before[1] += weight
            before[2] += count
    return [value for value, _, count in pools for _ in range(int(count))]
