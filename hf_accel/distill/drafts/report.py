"""The value of a draft for a target: measured acceptances and costs, and the speed-up that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from ...generation.speculation.acceptance import gains
from ...patching.printed import Printed

# The least speed-up that timing can tell from none.
WORTHWHILE = 1.05


@dataclass(frozen=True, repr=False)
class AcceptanceReport(Printed):
    """The acceptance of a draft's tokens by a target, its cost on this machine, and whether it pays.

    temperature: of both; 0 is greedy search. batch_size: sequences that decoded together.
    text_acceptance, text_error: teacher-forced on the dataset's own text: the mean of sum(min(p, q)), or at
        temperature 0 of both finding the same token likeliest, and its standard error. text_same_top: the share where
        they do. text_positions: how many.
    acceptances: by position in the draft, if all before it were accepted, in the target's own continuations of
        `prompts` prompts, `tokens` tokens in all; verified: drafted tokens that this rests on.
    step_seconds: of a pass of the target over the last token of each sequence, everything included but what it keeps
        for a drafter.
    draft_costs: of a whole draft of 0, 1, 2, ... tokens as generate() pays it, with all that is done around it, and
        verify_costs: of a pass that verifies as many, both in units of step_seconds.
    setting: what the two models ran as.
    """

    temperature: float
    batch_size: int
    text_acceptance: float
    text_error: float
    text_same_top: float
    text_positions: int
    acceptances: tuple[float, ...]
    verified: tuple[int, ...]
    prompts: int
    tokens: int
    step_seconds: float
    draft_costs: tuple[float, ...]
    verify_costs: tuple[float, ...]
    setting: str

    @property
    def max_draft(self) -> int:
        return len(self.acceptances)

    def expected_tokens(self, num_draft: int) -> float:
        """Tokens that a pass brings a sequence."""
        return expected_tokens(self.acceptances[:num_draft])

    def speed_up(self, num_draft: int) -> float:
        """The predicted speed-up over no draft."""
        return self.expected_tokens(num_draft) / self.cost(num_draft)

    def cost(self, num_draft: int) -> float:
        """The time of a pass and of its draft, in units of step_seconds."""
        return self.draft_costs[num_draft] + self.verify_costs[num_draft]

    def break_even(self, num_draft: int) -> float:
        """The acceptance, the same at each position, from which on so many tokens pay; inf if they never do."""
        return acceptance_for(self.cost(num_draft), num_draft)

    @property
    def num_draft(self) -> int:
        """The best number of tokens to draft, at least 1."""
        return max(range(1, self.max_draft + 1), key=self.speed_up)

    @property
    def draft_cost(self) -> float:
        """The cost of a drafted token, in a draft of the best length."""
        return self.draft_costs[self.num_draft] / self.num_draft

    @property
    def use(self) -> bool:
        """True if drafting makes generation faster by more than timing can be wrong."""
        return self.speed_up(self.num_draft) >= WORTHWHILE

    @property
    def verdict(self) -> str:
        best = self.num_draft
        factor, needed = self.speed_up(best), self.break_even(best)
        if self.use:
            return f"use it with num_draft={best}: {factor:.2f}x as fast is predicted"
        mean = acceptance_for(self.expected_tokens(best), best)
        reason = (
            f"a drafted token costs {self.draft_cost:.2f} steps, which no acceptance pays for: make the draft smaller"
            if needed == inf
            else f"{mean:.0%} is accepted, and it pays from {needed:.0%}: train the draft longer, or make it smaller"
        )
        start = "it hardly matters" if factor >= 1 else "do not use it"
        return f"{start}: at best {factor:.2f}x, with num_draft={best}; {reason}"

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold; break_even is None where no acceptance pays."""
        counts = range(1, self.max_draft + 1)
        by_count = [
            {
                "num_draft": count,
                "expected_tokens": self.expected_tokens(count),
                "draft_cost": self.draft_costs[count],
                "verify_cost": self.verify_costs[count],
                "speed_up": self.speed_up(count),
                "break_even": None if (needed := self.break_even(count)) == inf else needed,
            }
            for count in counts
        ]
        return asdict(self) | {
            "by_num_draft": by_count,
            "num_draft": self.num_draft,
            "use": self.use,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        what = "greedy agreement" if self.temperature == 0 else f"acceptance at temperature {self.temperature:g}"
        lines = [
            f"{what} on the dataset's text: {self.text_acceptance:.3f} +- {self.text_error:.3f}, same top token "
            f"{self.text_same_top:.0%} ({self.text_positions:,} positions)",
            f"on {self.tokens:,} tokens of the target's own after {self.prompts} prompts, batch {self.batch_size}, "
            f"{self.setting}:",
            f"a step of the target {1e3 * self.step_seconds:.2f} ms, a drafted token {self.draft_cost:.2f} of it",
            f"{'num_draft':>9} {'accepted':>9} {'verified':>9} {'tokens a pass':>14} {'draft cost':>11} "
            f"{'verify cost':>12} "
            f"{'break-even':>11} {'speed-up':>9}",
        ]
        for count in range(1, self.max_draft + 1):
            needed = self.break_even(count)
            lines.append(
                f"{count:>9} {self.acceptances[count - 1]:>9.0%} {self.verified[count - 1]:>9} "
                f"{self.expected_tokens(count):>14.2f} {self.draft_costs[count]:>11.2f} "
                f"{self.verify_costs[count]:>12.2f} "
                f"{'never' if needed == inf else format(needed, '.0%'):>11} {self.speed_up(count):>8.2f}x"
            )
        return "\n".join([*lines, self.verdict])


def expected_tokens(acceptances: Sequence[float]) -> float:
    """Return the expected new tokens of a pass with this draft: the accepted ones, and one of the model's own."""
    return 1.0 + sum(gains(acceptances))


def acceptance_for(tokens: float, num_draft: int) -> float:
    """Return the smallest acceptance, the same at each position, with which a pass is expected to give `tokens`.

    Drafting pays if that is more than its time, in passes without drafts (Leviathan et al. 2023, arXiv 2211.17192).
    The result is infinite if num_draft + 1 tokens are too few.
    """
    if tokens > num_draft + 1:
        return inf
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens([middle] * num_draft) < tokens else (low, middle)
    return high
