"""Chooses the draft length of each sequence so that the most tokens are generated per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The seconds of a pass, as a function of its rows: the tokens that it computes, which are the rows of its input.
Seconds = Callable[[int], float]


def no_time(rows: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Allocation:
    """lengths: the draft length of each sequence. rate: the expected new tokens per second of decoding."""

    lengths: list[int]
    rate: float


@dataclass(frozen=True)
class Prices:
    """The costs of drafting and verifying in a pass.

    Without drafts, the pass has one row for each of `sequences`, which decode, and `other_rows`. verify: the seconds
    of a pass of the model. draft: the seconds of a pass of the drafter. alone: whether the time of a pass without the
    other rows was measured.
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
        """Seconds to draft these lengths: one pass of the drafter per position, over the drafts that reach it."""
        depths = range(max(lengths, default=0))
        return sum(self.draft(sum(length > depth for length in lengths)) for depth in depths)

    def extra(self, lengths: Sequence[int]) -> float:
        """The seconds that drafts of these lengths add to the pass, drafting included."""
        return self.verify(self.rows + sum(lengths)) - self.verify(self.rows) + self.drafting(lengths)


@dataclass(frozen=True)
class Option:
    """The `count` drafted tokens with the highest gains among the first `depth` positions.

    tokens: the expected number of accepted tokens. drafting: the seconds to draft them.
    """

    depth: int
    count: int
    tokens: float
    drafting: float


def allocate(gains: Sequence[Sequence[float]], prices: Prices) -> Allocation:
    """Choose the draft lengths with the highest rate of new tokens (the goodput of SmartSpec, arXiv 2406.14066).

    gains[i][j]: the probability that the first j + 1 drafted tokens of sequence i are all accepted. At most
    len(gains[i]) tokens are drafted for sequence i. The probabilities do not rise with j. So for each total number of
    drafted tokens, those with the highest gains are the best choice. All total numbers are tried, because the time of
    a kernel rises in steps. Other rows, such as prefill, are computed in any case: next to them, a drafted token pays
    if it comes faster than by decoding alone. The choice is optimal if the time of a drafter's pass is linear in its
    rows.
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

    best = max(options, key=rate)  # among equal rates, the one with the fewest rows, which comes first
    highest = rate(best)
    if decoding != prices.rows:
        best = max(options, key=lambda o: o.tokens - highest * (prices.verify(prices.rows + o.count) + o.drafting))
    lengths = [0] * len(gains)
    for _, _, i in [entry for entry in entries if entry[1] < best.depth][: best.count]:
        lengths[i] += 1
    return Allocation(lengths, highest)


def options_to_depth(entries: list[tuple[float, int, int]], depth: int, draft: Seconds) -> list[Option]:
    """Make an Option of each number of drafted tokens at the first `depth` positions.

    entries: (-gain, position, sequence) of each token that may be drafted, sorted.
    """
    options = []
    tokens, widths, drafting = 0.0, [0] * depth, 0.0
    for count, (gain, position, _) in enumerate([entry for entry in entries if entry[1] < depth], start=1):
        tokens -= gain
        if draft is not no_time:
            widths[position] += 1
            drafting += draft(widths[position]) - (draft(widths[position] - 1) if widths[position] > 1 else 0.0)
        options.append(Option(depth, count, tokens, drafting))
    return options
