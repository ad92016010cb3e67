"""Statistics of speculative decoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpeculationStatistics:
    """Counts over all sequences that decoded in a run.

    steps: decoding steps of single sequences, with or without a draft. A step gives the accepted tokens and one more.
    passes: passes of the model. tokens: new tokens. lengths: the number of steps with a draft of each length.
    drafted_at, accepted_at: the drafted and accepted tokens at each position of the draft, from 0 on.
    """

    steps: int = 0
    passes: int = 0
    tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    drafting_seconds: float = 0.0
    verifying_seconds: float = 0.0

    def record_step(self, drafted: int, accepted: int, tokens: int | None = None) -> None:
        """Record a decoding step of one sequence.

        tokens: its new tokens, if fewer than accepted + 1 because the sequence ended. Raises ValueError for more
        accepted than drafted tokens.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} tokens accepted of {drafted} drafted")
        self.steps += 1
        self.tokens += accepted + 1 if tokens is None else tokens
        self.lengths[drafted] += 1
        add_at(self.drafted_at, [1] * drafted)
        add_at(self.accepted_at, [1] * accepted)

    def record_pass(self, drafting_seconds: float = 0.0, verifying_seconds: float = 0.0) -> None:
        self.passes += 1
        self.drafting_seconds += drafting_seconds
        self.verifying_seconds += verifying_seconds

    @property
    def drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that were accepted; None if none were drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_at(self) -> list[float]:
        """By position: accepted there, of those drafted there. The one after a rejected token counts as drafted."""
        accepted = self.accepted_at + [0] * (len(self.drafted_at) - len(self.accepted_at))
        return [a / d for a, d in zip(accepted, self.drafted_at, strict=True)]

    @property
    def tokens_per_pass(self) -> float | None:
        """The mean number of new tokens of a decoding step; None before the first step."""
        return self.tokens / self.steps if self.steps else None

    def merge(self, other: SpeculationStatistics) -> SpeculationStatistics:
        """Return the sum of both statistics. Neither is changed."""
        merged = SpeculationStatistics(
            steps=self.steps + other.steps,
            passes=self.passes + other.passes,
            tokens=self.tokens + other.tokens,
            lengths=self.lengths + other.lengths,
            drafted_at=list(self.drafted_at),
            accepted_at=list(self.accepted_at),
            drafting_seconds=self.drafting_seconds + other.drafting_seconds,
            verifying_seconds=self.verifying_seconds + other.verifying_seconds,
        )
        add_at(merged.drafted_at, other.drafted_at)
        add_at(merged.accepted_at, other.accepted_at)
        return merged

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that can be written as JSON. The keys of draft_lengths are strings, as in JSON."""
        return {
            "passes": self.passes,
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_pass": self.tokens_per_pass,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": self.acceptance,
            "drafted_at": list(self.drafted_at),
            "accepted_at": self.accepted_at + [0] * (len(self.drafted_at) - len(self.accepted_at)),
            "acceptance_at": self.acceptance_at,
            "draft_lengths": {str(length): self.lengths[length] for length in sorted(self.lengths)},
            "drafting_seconds": self.drafting_seconds,
            "verifying_seconds": self.verifying_seconds,
        }


def add_at(counts: list[int], more: list[int]) -> None:
    """Add more[i] to counts[i]. `counts` grows if it is shorter."""
    counts += [0] * (len(more) - len(counts))
    for i, count in enumerate(more):
        counts[i] += count
