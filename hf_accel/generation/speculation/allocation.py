"""Which sequences get how many rows of a pass, so that tokens come fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Seconds = Callable[[int], float]  # of a pass, over its rows


def no_time(rows: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Allocation:
    """lengths: of each sequence's draft. rate: new tokens a second of decoding."""

    lengths: list[int]
    rate: float


@dataclass(frozen=True)
class Prices:
    """Seconds of a pass over `sequences` + `other_rows` rows and what is drafted on top, and of drafting it.

    alone: whether it is known what a pass costs without the other rows.
    """

    sequences: int
    other_rows: int
    verify: Seconds
    draft: Seconds = no_time
    alone: bool = True

    @property
    def rows(self) -> int:
        return self.sequences + self.other_rows

    def drafting(self, lengths: Sequence[int]) -> float:
        """One pass of the drafter for each position, over the sequences that are drafted that far."""
        depths = range(max(lengths, default=0))
        return sum(self.draft(sum(length > depth for length in lengths)) for depth in depths)

    def extra(self, lengths: Sequence[int]) -> float:
        """Seconds more than without drafts."""
        return self.verify(self.rows + sum(lengths)) - self.verify(self.rows) + self.drafting(lengths)


@dataclass(frozen=True)
class Option:
    """The most promising rows, as many as `count`, of the first `depth` positions."""

    depth: int
    count: int
    tokens: float
    drafting: float


def allocate(gains: Sequence[Sequence[float]], prices: Prices) -> Allocation:
    """Water-filling: rows go to sequences by what each is expected to bring, and as many as make the rate the highest.

    gains[i][j]: the chance that sequence i's first j + 1 drafted tokens are all accepted; at most len(gains[i]) are
    drafted. It never rises with j, so for every number of rows the most promising ones are the best choice, and all
    numbers are looked at (a kernel's time has steps): the goodput of SmartSpec (2406.14066). Other rows (prefill) are
    computed anyway: beside them a drafted row pays if its tokens come faster than they would by decoding alone.
    Exact where a drafter's pass costs a constant and so much a row.
    """
    entries = sorted((-gain, depth, i) for i, chain in enumerate(gains) for depth, gain in enumerate(chain))
    options = [Option(0, 0, 0.0, 0.0)]
    free = prices.draft is no_time
    deepest = max(map(len, gains), default=0)
    for depth in [deepest] if free else range(1, deepest + 1):
        options += options_to_depth(entries, depth, prices.draft)

    decoding = prices.sequences if prices.alone else prices.rows

    def rate(option: Option) -> float:
        seconds = prices.verify(decoding + option.count) + option.drafting
        return (prices.sequences + option.tokens) / seconds

    best = max(options, key=rate)  # the first of equals: fewest rows
    highest = rate(best)
    if decoding != prices.rows:
        best = max(options, key=lambda o: o.tokens - highest * (prices.verify(prices.rows + o.count) + o.drafting))
    lengths = [0] * len(gains)
    for _, _, i in [entry for entry in entries if entry[1] < best.depth][: best.count]:
        lengths[i] += 1
    return Allocation(lengths, highest)


def options_to_depth(entries: list[tuple[float, int, int]], depth: int, draft: Seconds) -> list[Option]:
    options = []
    tokens, widths, drafting = 0.0, [0] * depth, 0.0
    for count, (gain, position, _) in enumerate([entry for entry in entries if entry[1] < depth], start=1):
        tokens -= gain
        if draft is not no_time:
            widths[position] += 1
            drafting += draft(widths[position]) - (draft(widths[position] - 1) if widths[position] > 1 else 0.0)
        options.append(Option(depth, count, tokens, drafting))
    return options
