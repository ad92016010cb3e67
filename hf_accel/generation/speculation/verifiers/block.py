"""Block verification (Sun et al. 2025, arXiv 2403.10444). It accepts at least as many tokens on average as token
verification."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from ....tensors import integers, sent
from .rejection import Drawn, DrawnDrafts, RejectionVerifier


class BlockVerifier(RejectionVerifier):
    """Tests each prefix of a draft, and accepts the longest prefix that passes. So a prefix that fails may still be
    accepted as part of a longer one.

    The length of a draft must not depend on the tokens that were drawn for it.
    """

    name = "block"

    def accept(self, drawn: abc.Sequence[Drawn]) -> list[tuple[int, float]]:
        return [_longest(draft) for draft in drawn]

    def accept_on_device(self, drafts: DrawnDrafts) -> tuple[Tensor, Tensor]:
        factors = likelihoods_on_device(drafts)
        passed = drafts.uniforms < acceptances_on_device(drafts, factors)
        counts = (passed * torch.arange(1, passed.shape[1] + 1, device=passed.device)).amax(1)
        return counts, factors.gather(1, counts[:, None])[:, 0]


def _longest(draft: Drawn) -> tuple[int, float]:
    factors = likelihoods(draft)
    thresholds = acceptances(draft, factors)
    for count in range(len(thresholds), 0, -1):
        if draft.uniforms[count - 1] < thresholds[count - 1]:
            return count, factors[count]
    return 0, factors[0]


def likelihoods(draft: Drawn) -> list[float]:
    """For each prefix of the draft, from the empty one on, its likelihood ratio of p to q, limited to 1 at each token.

    The empty prefix has the ratio 1.
    """
    values = [1.0]
    for p, q in zip(draft.p_drafted, draft.q_drafted, strict=True):
        values.append(min(values[-1] * p / q, 1.0) if q > 0 else float(p > 0) * values[-1])
    return values


def acceptances(draft: Drawn, factors: list[float]) -> list[float]:
    """For each prefix of at least one token, the probability that it passes its test. factors: see likelihoods."""
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


def likelihoods_on_device(drafts: DrawnDrafts) -> Tensor:
    """For each prefix, from the empty one on, its likelihood ratio of p to q, limited to 1 at each token.

    Returns [n, k + 1] float64. The empty prefix has the ratio 1.
    """
    values = [torch.ones_like(drafts.uniforms[:, 0])]
    for p, q in zip(drafts.p_drafted.unbind(1), drafts.q_drafted.unbind(1), strict=True):
        # Where q is 0, a token came that q cannot draw: it stays if p can draw it.
        ratio = torch.where(q > 0, (values[-1] * p / q).clamp(max=1), (p > 0) * values[-1])
        values.append(ratio)
    return torch.stack(values, 1)


def acceptances_on_device(drafts: DrawnDrafts, factors: Tensor) -> Tensor:
    """For each prefix of at least one token, the probability that it passes its test, [n, k] float64.

    factors: see likelihoods_on_device. Beyond the end of a draft it is 0.
    """
    places = [(row, at) for row, length in enumerate(drafts.lengths) for at in range(1, length)]
    if not places:
        return factors[:, 1:]
    flat = sent(integers([drafts.starts[row] + at for row, at in places]), factors)
    inner = sent(integers([row * factors.shape[1] + at for row, at in places]), factors)
    factor = factors.flatten()[inner]
    rest = torch.addcmul(-drafts.q[flat], drafts.p[flat], factor.to(drafts.p.dtype)[:, None]).clamp_(min=0)
    mass = rest.sum(-1, dtype=torch.float64)
    whole = mass + 1 - factor
    passing = torch.where(whole > 0, mass / whole, torch.ones_like(whole))
    return factors.flatten().index_copy(0, inner, passing).view_as(factors)[:, 1:]
