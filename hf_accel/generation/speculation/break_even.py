"""The expected speed-up by a draft, in closed form (Leviathan et al. 2023, arXiv 2211.17192).

acceptances: for each drafted token, the probability that it is accepted if all tokens before it were.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul


def gains(acceptances: Sequence[float]) -> list[float]:
    """For each drafted token, the probability that it and all tokens before it are accepted."""
    return list(accumulate(acceptances, mul))


def expected_tokens(acceptances: Sequence[float]) -> float:
    """The expected new tokens of a pass with this draft: the accepted ones, and one of the model's own."""
    return 1.0 + sum(gains(acceptances))


def speed_up(acceptances: Sequence[float], draft_cost: float, verify_cost: float = 1.0) -> float:
    """The expected speed-up over decoding without drafts.

    draft_cost: the time to draft a token. verify_cost: the time of the pass that verifies the draft. The unit of both
    is a pass of the model over one token.
    """
    return expected_tokens(acceptances) / (len(acceptances) * draft_cost + verify_cost)


def break_even_acceptance(num_draft: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """The smallest acceptance, equal for all tokens, at which drafting `num_draft` tokens is not slower.

    It is infinite if drafting is slower even when all tokens are accepted. Costs: see speed_up.
    """
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
