"""How likely drafted tokens are to be accepted, learnt from those that were verified."""

from __future__ import annotations

START = 0.5  # expected of a source of drafts that nothing is known of
START_WEIGHT = 2.0  # in verified tokens
SOURCE_MEMORY = 200.0  # verified tokens at a position that count, of all sequences
SEQUENCE_WEIGHT = 3.0  # of what all sequences showed, in one sequence's own verified tokens
SEQUENCE_MEMORY = 12.0


class Tally:
    """Verified and accepted tokens by position in the draft, older ones counting less and less.

    Verified are the accepted ones and the first that was not: those after it were never looked at.
    """

    def __init__(self, memory: float) -> None:
        self.keep = 1.0 - 1.0 / memory
        self.verified: list[float] = []
        self.accepted: list[float] = []

    def observe(self, drafted: int, accepted: int) -> None:
        for position in range(min(drafted, accepted + 1)):
            if position == len(self.verified):
                self.verified.append(0.0)
                self.accepted.append(0.0)
            self.verified[position] = self.verified[position] * self.keep + 1.0
            self.accepted[position] = self.accepted[position] * self.keep + (position < accepted)

    def at(self, position: int) -> tuple[float, float]:
        if position >= len(self.verified):
            return 0.0, 0.0
        return self.verified[position], self.accepted[position]


class SourceRates:
    """Acceptance of one source's drafts over all sequences of a run.

    By position, each given that all before it were accepted: the first token of what was looked up is a guess, those
    after it continue a copy. A position is expected to be like the one before it as far as it was not verified itself
    (geometric decay of the chain), so that one never drafted does not count as one never accepted.
    """

    def __init__(self) -> None:
        self.tally = Tally(SOURCE_MEMORY)
        self.deepest = 0  # most tokens of one draft that were accepted

    def observe(self, drafted: int, accepted: int) -> None:
        self.tally.observe(drafted, accepted)
        self.deepest = max(self.deepest, accepted)

    @property
    def longest_draft(self) -> int:
        """What may be risked: twice what has ever been accepted."""
        return max(1, 2 * self.deepest)

    def acceptances(self, count: int) -> list[float]:
        """Of the first `count` positions."""
        rate, rates = START, []
        for position in range(count):
            verified, accepted = self.tally.at(position)
            rate = (START_WEIGHT * rate + accepted) / (START_WEIGHT + verified)
            rates.append(rate)
        return rates


class SequenceRates:
    """Acceptance in one sequence: its own tokens lately, on top of what its source showed elsewhere."""

    def __init__(self, source: SourceRates) -> None:
        self.source = source
        self.tally = Tally(SEQUENCE_MEMORY)
        self.last_pass = -1  # in which it was drafted for

    def observe(self, drafted: int, accepted: int) -> None:
        self.tally.observe(drafted, accepted)
        self.source.observe(drafted, accepted)

    def acceptances(self, elsewhere: list[float]) -> list[float]:
        """elsewhere: of the source, by position, as many as are wanted."""
        rates: list[float] = []
        for position, expected in enumerate(elsewhere):
            verified, accepted = self.tally.at(position)
            if rates:  # what the source never drafted is like this sequence's position before
                known = self.source.tally.at(position)[0]
                expected = (known * expected + START_WEIGHT * rates[-1]) / (known + START_WEIGHT)
            rates.append((SEQUENCE_WEIGHT * expected + accepted) / (SEQUENCE_WEIGHT + verified))
        return rates
