"""Estimates of the probability that a drafted token is accepted, learnt from verified drafts."""

from __future__ import annotations

PRIOR_ACCEPTANCE = 0.5  # the acceptance expected of a source before any of its drafts was verified
PRIOR_WEIGHT = 2.0  # the weight of the expected acceptance, in verified tokens
SOURCE_MEMORY = 200.0  # about so many verified tokens at a position count, over all sequences
SEQUENCE_WEIGHT = 3.0  # the weight of the source's acceptance in a sequence's own, in verified tokens
SEQUENCE_MEMORY = 12.0  # about so many verified tokens at a position count, in one sequence


class Tally:
    """Counts of verified and accepted tokens by position in the draft. Older tokens count less (exponential decay).

    The verified tokens of a draft are the accepted ones and the first rejected one. The tokens after it are not
    verified, because their prefix is wrong. memory: the sum of the weights of all older tokens.
    """

    def __init__(self, memory: float) -> None:
        self.decay = 1.0 - 1.0 / memory
        self.verified: list[float] = []
        self.accepted: list[float] = []

    def observe(self, drafted: int, accepted: int) -> None:
        for position in range(min(drafted, accepted + 1)):
            if position == len(self.verified):
                self.verified.append(0.0)
                self.accepted.append(0.0)
            self.verified[position] = self.verified[position] * self.decay + 1.0
            self.accepted[position] = self.accepted[position] * self.decay + (position < accepted)

    def at(self, position: int) -> tuple[float, float]:
        """Return the weighted counts of verified and accepted tokens at a position of the draft."""
        if position >= len(self.verified):
            return 0.0, 0.0
        return self.verified[position], self.accepted[position]


class SourceRates:
    """The acceptance of one source's drafts over all sequences of a run.

    The acceptance is estimated for each position in the draft, given that all tokens before it were accepted. It
    differs by position: the first token of a copied text is a guess, and those after it continue the copy. The
    estimate of a position starts from that of the position before it. So a position that was never drafted is not
    taken for one that was never accepted.
    """

    def __init__(self) -> None:
        self.tally = Tally(SOURCE_MEMORY)
        self.deepest = 0  # the most accepted tokens of one draft

    def observe(self, drafted: int, accepted: int) -> None:
        self.tally.observe(drafted, accepted)
        self.deepest = max(self.deepest, accepted)

    @property
    def longest_draft(self) -> int:
        """The longest draft that is allowed: twice the most accepted tokens of one draft, and at least one."""
        return max(1, 2 * self.deepest)

    def acceptances(self, count: int) -> list[float]:
        """Return the estimated acceptance of the first `count` positions."""
        rate, rates = PRIOR_ACCEPTANCE, []
        for position in range(count):
            verified, accepted = self.tally.at(position)
            rate = (PRIOR_WEIGHT * rate + accepted) / (PRIOR_WEIGHT + verified)
            rates.append(rate)
        return rates


class SequenceRates:
    """The acceptance in one sequence, estimated from its own latest drafts and from the source's other drafts."""

    def __init__(self, source: SourceRates) -> None:
        self.source = source
        self.tally = Tally(SEQUENCE_MEMORY)
        self.last_pass = -1  # the last pass in which the sequence had a draft
        self.is_known = False  # whether the source has read the sequence, which costs time once

    def observe(self, drafted: int, accepted: int) -> None:
        self.tally.observe(drafted, accepted)
        self.source.observe(drafted, accepted)

    def acceptances(self, source_rates: list[float]) -> list[float]:
        """Return the estimated acceptance of as many positions as `source_rates`, the source's acceptances, has."""
        rates: list[float] = []
        for position, expected in enumerate(source_rates):
            verified, accepted = self.tally.at(position)
            # A position that the source has rarely drafted is expected to be like this sequence's position before it.
            if rates:
                source_verified = self.source.tally.at(position)[0]
                expected = (source_verified * expected + PRIOR_WEIGHT * rates[-1]) / (source_verified + PRIOR_WEIGHT)
            rates.append((SEQUENCE_WEIGHT * expected + accepted) / (SEQUENCE_WEIGHT + verified))
        return rates
