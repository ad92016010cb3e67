"""What a draft is worth, in closed form (Leviathan et al. 2211.17192).

acceptances: of each drafted token, the chance that it is accepted if all before it were.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul


def gains(acceptances: Sequence[float]) -> list[float]:
    """For each drafted token the chance that it and all before it are accepted."""
    return list(accumulate(acceptances, mul))


def expected_tokens(acceptances: Sequence[float]) -> float:
    """Tokens that a pass with this draft brings: those accepted, and one of the model's own."""
    return 1.0 + sum(gains(acceptances))


def speed_up(acceptances: Sequence[float], draft_cost: float, verify_cost: float = 1.0) -> float:
    """Against not drafting. In passes of the model over one token: draft_cost of each drafted token, verify_cost of
    the pass that verifies them."""
    return expected_tokens(acceptances) / (len(acceptances) * draft_cost + verify_cost)


def break_even_acceptance(num_draft: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """The acceptance, the same for each token, from which on `num_draft` tokens pay. Above 1: they never do."""
    if speed_up([1.0] * num_draft, draft_cost, verify_cost) < 1:
        return float("inf")
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if speed_up([middle] * num_draft, draft_cost, verify_cost) < 1:
            low = middle
        else:
            high = middle
    return high
