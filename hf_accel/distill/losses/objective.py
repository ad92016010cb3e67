"""The objective of a student's training: the distances between two distributions, with their gradients written down
instead of found by autograd."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedError

LOSSES = ("fkl", "rkl", "jsd", "tv", "nla", "lk")
FLOOR = -1e5
"""The least that a log-probability counts as, in nats. A token that is impossible for one of the two (its logit is
-inf) then costs the other much, but not infinitely much, which would make the student NaN. exp(FLOOR) is 0 in every
dtype."""


@dataclass(frozen=True)
class Objective:
    """L = alpha * CE + (1 - alpha) * T^2 * D(teacher, student), both softened by the temperature T (Hinton et al.
    1503.02531). alpha=1 is plain training.

    loss: "fkl" KL(t|s), "rkl" KL(s|t), "jsd" beta * KL(t|m) + (1 - beta) * KL(s|m) with m = beta * t + (1 - beta) * s
    (2306.13649), "tv" half the L1 distance, "nla" -log(1 - tv), minus the log of the chance that a draft is accepted,
    "lk" lambda * fkl + (1 - lambda) * tv with lambda = exp(-eta * acceptance) (2602.23881).
    """

    alpha: float = 0.5
    temperature: float = 2.0
    loss: str = "fkl"
    beta: float = 0.5
    eta: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UnsupportedError(f"alpha={self.alpha}: the share of the labels is from 0 to 1")
        if not self.temperature > 0 or self.temperature == float("inf"):
            raise UnsupportedError(f"temperature={self.temperature}: softening needs a finite number above 0")
        if self.loss not in LOSSES:
            raise UnsupportedError(f"loss={self.loss!r} is not known; there are {', '.join(LOSSES)}")
        if not 0 < self.beta < 1:
            raise UnsupportedError(f"beta={self.beta}: above 0 and below 1; the ends are loss='fkl' and loss='rkl'")
        if not self.eta >= 0:
            raise UnsupportedError(f"eta={self.eta}: 0 or more")


class Sums(NamedTuple):
    """Scalars, float32 (float64 where the student's numbers are float64).

    total: alpha * ce + (1 - alpha) * kd, differentiable. ce: the sum of cross entropies. kd: T^2 times the sum of D.
    ce and kd carry no gradient.
    """

    total: Tensor
    ce: Tensor
    kd: Tensor


def mean(total: Tensor, count: int, num_items: Tensor | int | None) -> Tensor:
    """total / num_items, or total / count where num_items is None."""
    if num_items is None:
        return total / max(1, count)
    if isinstance(num_items, int) and num_items < 1:
        raise UnsupportedError(f"num_items={num_items}: the sum is divided by it; 1 or more, or None for the mean")
    return total / num_items


def value_and_gradient(log_s: Tensor, log_t: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return D [N] and its gradient in the student's softened logits [N, K]. log_s, log_t: float [N, K], normalised
    and not below FLOOR. The gradient takes the weight of "lk" for a constant, as the paper does."""
    return FORMS[objective.loss](log_s, log_t, objective)


def _fkl(log_s: Tensor, log_t: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    t = log_t.exp()
    value = (log_t - log_s).mul_(t).sum(-1)
    return value, log_s.exp().sub_(t)


def _rkl(log_s: Tensor, log_t: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    s = log_s.exp()
    u = (log_s - log_t).mul_(s)
    value = u.sum(-1)
    return value, u.addcmul_(s, value[:, None], value=-1)


def _jsd(log_s: Tensor, log_t: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    s, t, beta = log_s.exp(), log_t.exp(), objective.beta
    # log(beta * t + (1 - beta) * s), also where both underflow
    log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))
    u = (log_s - log_m).mul_(s)
    kl_s = u.sum(-1)
    value = (log_t - log_m).mul_(t).sum(-1).mul_(beta).add_(kl_s, alpha=1 - beta)
    return value, u.addcmul_(s, kl_s[:, None], value=-1).mul_(1 - beta)


def _tv(log_s: Tensor, log_t: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    return _tv_of(log_s.exp(), log_t.exp())


def _tv_of(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    difference = s - t
    value = difference.abs().sum(-1).div_(2)
    u = difference.sign_().mul_(s).div_(2)
    return value, u.addcmul_(s, u.sum(-1, keepdim=True), value=-1)


def _nla(log_s: Tensor, log_t: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """-log(acceptance), in logarithms throughout: exact where nothing is accepted in float32, and the gradient, a
    token's share of the acceptance, stays below 1."""
    smaller = torch.minimum(log_s, log_t)
    log_acceptance = smaller.logsumexp(-1)
    u = smaller.sub_(log_acceptance[:, None]).exp_().mul_((log_s - log_t).sign_().sub_(1).div_(2))
    return -log_acceptance, u.addcmul_(log_s.exp(), u.sum(-1, keepdim=True), value=-1)


def _lk(log_s: Tensor, log_t: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    s, t = log_s.exp(), log_t.exp()
    share = torch.minimum(s, t).sum(-1).mul_(-objective.eta).exp_()
    tv, gradient = _tv_of(s, t)
    kl = (log_t - log_s).mul_(t).sum(-1)
    gradient.mul_(1 - share[:, None]).addcmul_(s.sub_(t), share[:, None])
    return torch.lerp(tv, kl, share), gradient


FORMS = {"fkl": _fkl, "rkl": _rkl, "jsd": _jsd, "tv": _tv, "nla": _nla, "lk": _lk}


@torch.no_grad()
def agreement(target_logits: Tensor, draft_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Measure how well a draft model agrees with its target at each of N positions.

    Returns the chance that a token drawn from the draft is accepted, sum(min(p, q)) (Leviathan et al. 2211.17192),
    float32 [N], and whether both find the same token likeliest, bool [N].

    target_logits, draft_logits: [N, V] and [N, V'], of vocabularies that begin with the same tokens; a token that only
    one of them has is never drafted, or never accepted. temperature: of both; 0 is greedy search, where the chance is
    0 or 1.
    """
    shared = min(target_logits.shape[-1], draft_logits.shape[-1])
    target, draft = target_logits.float(), draft_logits[..., :shared].float()
    same = target.argmax(-1) == draft.argmax(-1)
    if temperature == 0:
        return same.float(), same
    p, q = (logits.div(temperature).softmax(-1) for logits in (target, draft))
    return torch.minimum(p[..., :shared], q).sum(-1), same
