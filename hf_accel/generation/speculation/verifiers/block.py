"""Verification of a draft as a whole (Sun et al. 2025, arXiv 2403.10444): never fewer tokens stay than one by one."""

from __future__ import annotations

from collections import abc

import torch

from .rejection import Drawn, RejectionVerifier


class BlockVerifier(RejectionVerifier):
    """The longest beginning stays that passes its own test; what comes later in the draft can save what comes earlier.

    The draft's length must not have been chosen by looking at the tokens drawn.
    """

    name = "block"

    def accept(self, drawn: abc.Sequence[Drawn]) -> list[tuple[int, float]]:
        return [_longest(draft) for draft in drawn]


def _longest(draft: Drawn) -> tuple[int, float]:
    factors = likelihoods(draft)
    thresholds = acceptances(draft, factors)
    for count in range(len(thresholds), 0, -1):
        if draft.uniforms[count - 1] < thresholds[count - 1]:
            return count, factors[count]
    return 0, factors[0]


def likelihoods(draft: Drawn) -> list[float]:
    """Of each beginning how much likelier it is under p than under q, cut at 1 step by step; the empty one's is 1."""
    values = [1.0]
    for p, q in zip(draft.p_drafted, draft.q_drafted, strict=True):
        values.append(min(values[-1] * p / q, 1.0) if q > 0 else float(p > 0) * values[-1])
    return values


def acceptances(draft: Drawn, factors: list[float]) -> list[float]:
    """The probability with which each beginning, from one token on, stays."""
    count = len(draft.p_drafted)
    if count == 1:
        return [factors[1]]
    scale = torch.tensor(factors[1:count], dtype=torch.float64, device=draft.p.device).to(draft.p.dtype)
    rest = torch.addcmul(-draft.q[1:], draft.p[1:count], scale[:, None]).clamp_(min=0)
    left = rest.sum(-1, dtype=torch.float64).tolist()
    inner = [
        mass / (mass + 1 - factor) if mass + 1 - factor > 0 else 1.0
        for mass, factor in zip(left, factors[1:count], strict=True)
    ]
    return [*inner, factors[count]]
