"""Counts of drafted and accepted tokens, and the acceptance that they let expect.

An acceptance is the probability that a drafted token is accepted if all tokens before it in the draft were.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul


class Tally:
    """Counts of drafted, verified and accepted tokens by position in the draft, from 0 on.

    The verified tokens of a draft are the accepted ones and the first rejected one. The tokens after it are not
    verified, because their prefix is wrong. memory: about so many tokens of a position count, because each new one
    makes the older ones count less; None counts all the same.
    """

    def __init__(self, memory: float | None = None) -> None:
        self.keep = 1 if memory is None else 1.0 - 1.0 / memory
        self.drafted: list[float] = []
        self.verified: list[float] = []
        self.accepted: list[float] = []

    def fade(self, keep: float | None = None) -> None:
        """Let all counts so far count less, as one more draft does, or to the part `keep`."""
        keep = self.keep if keep is None else keep
        if keep < 1:
            for counts in (self.drafted, self.verified, self.accepted):
                counts[:] = [count * keep for count in counts]

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` tokens, of which the first `accepted` were accepted."""
        # Positions that it does not reach get older too: what is known of them may be true no longer.
        self.fade()
        for counts in (self.drafted, self.verified, self.accepted):
            counts += [0] * (drafted - len(counts))
        for position in range(drafted):
            self.drafted[position] += 1
            self.verified[position] += position <= accepted
            self.accepted[position] += position < accepted

    def count(self, position: int, *, accepted: bool) -> None:
        """Count one token whose prefix was accepted."""
        for counts in (self.drafted, self.verified, self.accepted):
            counts += [0] * (position + 1 - len(counts))
        self.drafted[position] += 1
        self.verified[position] += 1
        self.accepted[position] += accepted

    def acceptances(self, expected: Sequence[float | None], weight: float) -> list[float]:
        """Return the acceptance of each position. What is expected there counts as `weight` verified tokens.

        None stands for the acceptance of the position before, so that one that was never drafted is not taken for one
        that was never accepted. At the first position it stands for nothing.
        """
        rates: list[float] = []
        for position, rate in enumerate(expected):
            seen = position < len(self.verified)
            verified, accepted = (self.verified[position], self.accepted[position]) if seen else (0, 0)
            if rate is None and not rates:
                rates.append(accepted / verified if verified else 0.0)
            else:
                rates.append((weight * (rates[-1] if rate is None else rate) + accepted) / (weight + verified))
        return rates


def gains(acceptances: Sequence[float]) -> list[float]:
    """Return for each drafted token the probability that it and all tokens before it are accepted."""
    return list(accumulate(acceptances, mul))


def likeliest_tree(rates: Sequence[Sequence[float]], nodes: int) -> list[tuple[float, int]]:
    """Return the tokens of the tree of at most `nodes` tokens of which the most are expected to be accepted.

    rates[r][d]: the acceptance of the token of rank r among its siblings behind d accepted ones. Returns of each token
    the probability that it and all before it are accepted, and its depth from 0 on; the likeliest first.
    """
    found: list[tuple[float, int]] = []
    waiting: list[tuple[float, int, int, float]] = []  # minus the probability, depth, rank, that of the parent

    def wait(depth: int, rank: int, parent: float) -> None:
        if depth < len(rates[0]) and rank < len(rates) and rates[rank][depth] > 0:
            heappush(waiting, (-parent * rates[rank][depth], depth, rank, parent))

    wait(0, 0, 1.0)
    while waiting and len(found) < nodes:
        gain, depth, rank, parent = heappop(waiting)
        found.append((-gain, depth))
        wait(depth + 1, 0, -gain)
        wait(depth, rank + 1, parent)
    return found
