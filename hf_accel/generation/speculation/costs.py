"""The measured time of passes, and the draft lengths that bring the most tokens per second."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import sqrt
from statistics import median_low

from ..sequence import NO_SHAPE, Shape

MEMORY = 31  # the last observations of a width that count
RECENT, FEWEST = 64, 7  # of these, those of the last passes, because a machine changes its pace; or at least so many
EXTRAPOLATED = 0.02  # a further row than any measured is assumed to add this share of the time, or a quarter of a row
DRAFTS = 32.0  # about so many of the last drafts count
SLOW = 2.0  # how many times slower than expected an observed draft may count as
FIRST_ADDED = 4  # may be added to a pass before any more were measured
ALL_COUNTS = 16  # of more drafted tokens than so many not all numbers are tried
NOISE = 0.1  # the assumed mean relative deviation of an observation, which counts as two of them

# The seconds of a pass, as a function of its rows: the tokens that it computes, which are the rows of its input.
Seconds = Callable[[int], float]
# Those of a draft, as a function of its levels and of the tokens of all sequences.
DraftSeconds = Callable[[int, int], float]


class _Thread(threading.local):
    once = 0.0  # seconds


_thread = _Thread()


def now() -> float:
    """Return seconds, of which the differences within one thread leave out what is done once."""
    return time.perf_counter() - _thread.once


@contextmanager
def done_once() -> Iterator[None]:
    """Stop the clock of this thread while a pass does what no later one does, such as the capture of a graph.

    Otherwise the first pass of each shape would look as slow as many, and so would drafts.
    """
    start = now()
    try:
        yield
    finally:
        _thread.once += now() - start


class CostTable:
    """The seconds of a pass as a function of its rows, which never falls. A width is a measured number of rows.

    The estimate of a width is the median of its last observations. What its neighbours let expect is the first of
    them, so that one outlier is not believed. If more rows took less time, the estimates are averaged (isotonic
    regression). Between widths the function is linear. Beyond the largest width it rises slowly: a width that looks
    cheap is tried and so measured; a width that looks expensive would never be.
    """

    def __init__(self) -> None:
        self.widths: dict[int, deque[float]] = {}  # observations
        self._passes: dict[int, deque[int]] = {}  # the number of the pass of each
        self._count = 0  # of passes
        self._unread = set[int]()  # widths with observations that the estimates do not know yet
        self._doubts: dict[int, float] = {}  # relative standard errors of the estimates
        self._medians: dict[int, float] = {}
        self._curve: tuple[list[int], list[float]] = [], []  # widths in order, and the seconds of each

    def observe(self, rows: int, seconds: float) -> None:
        if rows < 1 or not seconds > 0:
            return
        # Large passes are rounded to fewer widths, because similar numbers of rows cost the same.
        step = 1 << max(0, rows.bit_length() - 6)
        rows = round(rows / step) * step
        if rows not in self.widths:
            self.widths[rows] = deque([self.seconds(rows)] if self.widths else [], maxlen=MEMORY)
            self._passes[rows] = deque([self._count] * len(self.widths[rows]), maxlen=MEMORY)
        self._count += 1
        self.widths[rows].append(seconds)
        self._passes[rows].append(self._count)
        self._unread.add(rows)

    def _read(self) -> None:
        """Estimate what was observed since it was asked for last."""
        for rows in self._unread:
            recent = sum(number > self._count - RECENT for number in self._passes[rows])
            seen = list(self.widths[rows])[-max(FEWEST, recent) :]
            # The lower median, because outliers are slow. The first observation of a width is half believed.
            median = min(seen[1], 2 * seen[0]) if len(seen) == 2 else median_low(seen)
            self._medians[rows] = median
            deviations = sum(min(abs(one / median - 1), 0.5) for one in seen)
            self._doubts[rows] = (2 * NOISE + deviations) / (2 + len(seen)) / sqrt(len(seen))
        self._unread.clear()
        widths = sorted(self.widths)
        self._curve = widths, isotonic([self._medians[n] for n in widths], [len(self.widths[n]) for n in widths])

    def is_measured(self, rows: int) -> bool:
        """Return whether a pass with half to twice as many rows was seen, or two if it was the very first."""
        near = (len(times) for seen, times in self.widths.items() if rows <= 2 * seen and seen <= 2 * rows)
        return sum(near) >= 2

    def step(self, rows: int, room: int) -> int:
        """Return how many rows a pass of `rows` may be given besides, at most `room`: twice as many as were measured.

        What a pass of many more would take is not known well enough to pay for it.
        """
        more = [seen - rows for seen in self.widths if rows < seen <= rows + room]
        return min(room, max(FIRST_ADDED, 2 * max(more, default=0)))

    def is_known(self, rows: int) -> bool:
        """Return whether passes with so many rows were seen, or with more."""
        return rows <= max((seen for seen, times in self.widths.items() if len(times) > 2), default=0)

    def seconds(self, rows: int) -> float:
        """The estimated seconds of a pass. Raises LookupError before the first pass was observed."""
        if self._unread:
            self._read()
        widths, seconds = self._curve
        if not widths:
            raise LookupError("no pass was observed yet")
        at = bisect_left(widths, rows)
        if at < len(widths) and widths[at] == rows:
            return seconds[at]
        if 0 < at < len(widths):
            part = (rows - widths[at - 1]) / (widths[at] - widths[at - 1])
            return seconds[at - 1] + part * (seconds[at] - seconds[at - 1])
        end = min(at, len(widths) - 1)
        return seconds[end] * (1 + (rows - widths[end]) * min(EXTRAPOLATED, 0.25 / widths[end]))

    def extra(self, rows: int, more: int) -> float:
        """The seconds that `more` rows add to a pass of `rows`, and by how much these may be wrong.

        By chance, additional rows may look free. This would not be corrected for long, because passes without them
        would become rare.
        """
        return self.seconds(rows + more) - self.seconds(rows) + self.doubt(rows) + self.doubt(rows + more)

    def doubt(self, rows: int) -> float:
        """The standard error of `seconds(rows)`."""
        if self._unread:
            self._read()
        widths, _ = self._curve
        at = bisect_left(widths, rows)
        near = widths[max(0, at - 1) : at + 1]
        return self._doubts[min(near, key=lambda seen: abs(seen - rows))] * self.seconds(rows)


class DraftCost:
    """The seconds of drafts: so many for each call, for each level and for each token, none of them below zero.

    A native call has most of its cost in the call itself, a draft model in its levels, and a batch in its tokens; what
    is expected of longer drafts decides whether they are tried. The three are those of the least squares (by
    coordinates, each from the values of the other two), nearest to what is assumed before several shapes were seen:
    that a longer draft costs half of the first one more for each level. A slow outlier counts as SLOW times
    what was expected.
    """

    ASSUMED = (0.5, 0.5, 0.0)  # parts of the first observation
    TRUST = 0.1  # the weight of what is assumed, in observations

    def __init__(self) -> None:
        self.count = 0
        self._parts = [0.0, 0.0, 0.0]  # seconds
        self._first = [0.0, 0.0, 0.0]
        self._begin()

    def _begin(self) -> None:
        # Of the observations (1, levels, tokens), and of the seconds, which count less the older they are.
        self._sums, self._products = (0.0,) * 3, (0.0,) * 6

    def observe(self, levels: int, tokens: int, seconds: float) -> None:
        expected = self.seconds(levels, tokens)
        if self.count == 0 or (self.count == 1 and expected > SLOW * seconds):  # the first one may be an outlier
            scale = seconds / (self.ASSUMED[0] + self.ASSUMED[1] * levels)
            self._parts = [scale * part for part in self.ASSUMED]
            self._first = list(self._parts)
            self._begin()
        else:
            seconds = min(seconds, SLOW * expected)
        self.count += 1
        keep, trust = 1 - 1 / DRAFTS, self.TRUST
        (a, b, c), (aa, ab, ac, bb, bc, cc) = self._sums, self._products
        a, b, c = keep * a + seconds, keep * b + levels * seconds, keep * c + tokens * seconds
        aa, ab, ac = keep * aa + 1, keep * ab + levels, keep * ac + tokens
        bb, bc, cc = keep * bb + levels * levels, keep * bc + levels * tokens, keep * cc + tokens * tokens
        self._sums, self._products = (a, b, c), (aa, ab, ac, bb, bc, cc)
        a, b, c = (each + trust * first for each, first in zip(self._sums, self._first, strict=True))
        call, level, token = self._parts
        for _ in range(8):  # written out, because each pass that drafts does this
            call = max(0.0, (a - ab * level - ac * token) / (aa + trust))
            level = max(0.0, (b - ab * call - bc * token) / (bb + trust))
            token = max(0.0, (c - ac * call - bc * level) / (cc + trust))
        self._parts = [call, level, token]

    def seconds(self, levels: int, tokens: int) -> float:
        """The estimated seconds of a draft; 0 before the first one was observed."""
        call, level, token = self._parts
        return call + level * levels + token * tokens


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to `values` in weighted least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # value, weight, count
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            other, heavy, many = pools.pop()
            value = (value * weight + other * heavy) / (weight + heavy)
            weight, count = weight + heavy, count + many
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]


def allocate(
    gains: Sequence[Sequence[float]],
    verify: Seconds,
    draft: DraftSeconds | None = None,
    *,
    other_rows: int = 0,
    least: float = 0.0,
) -> list[int]:
    """Return the draft lengths with the highest rate of new tokens; see allocate_trees.

    gains[i][j]: the probability that the first j + 1 drafted tokens of sequence i are all accepted.
    """
    trees = [[(gain, depth) for depth, gain in enumerate(chain)] for chain in gains]
    shapes, _ = allocate_trees(trees, verify, draft, other_rows=other_rows, least=least)
    return [shape.nodes for shape in shapes]


def allocate_trees(
    gains: Sequence[Sequence[tuple[float, int]]],
    verify: Seconds,
    draft: DraftSeconds | None = None,
    *,
    other_rows: int = 0,
    least: float = 0.0,
    room: int | None = None,
) -> tuple[list[Shape], float]:
    """Return the drafts with the highest rate of new tokens (the goodput of SmartSpec, arXiv 2406.14066), and the
    seconds that they are expected to gain.

    gains[i]: of each token that can be drafted for sequence i, the probability that it and all before it are accepted,
    and its depth from 0 on. verify: of the model's pass. draft: of a drafter; None if it needs none. other_rows: of
    the pass, such as prefill, which are computed in any case: next to them, a drafted token pays if it comes faster
    than by decoding alone. least: seconds that any draft must gain. room: the most drafted tokens, or None.

    No token is likelier than the one that it follows. So for each total number of drafted tokens, those with the
    highest gains are the best choice. All total numbers are tried, because the time of a kernel rises in steps (of
    more than ALL_COUNTS, some are left out), and all depths, because each costs the drafter something. The choice is
    optimal among these.
    """
    entries = sorted((-gain, depth, i) for i, tree in enumerate(gains) for gain, depth in tree)
    deepest = 1 + max((depth for _, depth, _ in entries), default=-1)
    most = len(entries) if room is None else min(room, len(entries))
    counts = [n for n in range(1, most + 1) if n <= ALL_COUNTS or n % (n // ALL_COUNTS) == 0 or n == most]
    rows = len(gains)
    bare, whole = verify(rows), verify(rows + other_rows)
    alone = {n: verify(rows + n) - bare for n in counts}
    added = alone if not other_rows else {n: verify(rows + other_rows + n) - whole for n in counts}
    options = [(0, 0, 0.0, 0.0)]  # depth, drafted tokens, expected accepted ones, seconds to draft
    for depth in [deepest] if draft is None else range(1, deepest + 1):
        sums = list(accumulate(-gain for gain, at, _ in entries if at < depth))
        options += [
            (depth, n, sums[n - 1], least + (0.0 if draft is None else draft(depth, n)))
            for n in counts
            if n <= len(sums)
        ]
    best = max((rows + tokens) / (bare + alone.get(n, 0.0) + seconds) for _, n, tokens, seconds in options)
    # Among equal choices the one with the fewest rows is taken, which comes first.
    depth, count, tokens, seconds = max(options, key=lambda one: one[2] - best * (added.get(one[1], 0.0) + one[3]))
    gained = tokens * bare / max(1, rows) - added.get(count, 0.0) - seconds
    shapes = [NO_SHAPE] * len(gains)
    for _, at, i in [entry for entry in entries if entry[1] < depth][:count]:
        shapes[i] = Shape(max(shapes[i].depth, at + 1), shapes[i].nodes + 1)
    return shapes, gained
