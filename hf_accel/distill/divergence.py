"""The distances between two distributions, in plain torch: the oracle of every faster form."""

from __future__ import annotations

import torch
from torch import Tensor

from .objective import Objective

FLOOR = -1e5
"""What a log-probability counts as at least, in nats: what is impossible for one of the two (a logit of -inf) is very
dear to the other, and not infinitely so, which would make the student NaN. exp(FLOOR) is 0 in every dtype."""


def divergence(log_s: Tensor, log_t: Tensor, objective: Objective) -> Tensor:
    """D(teacher, student) of each row. log_s, log_t: float [N, K] log-probabilities, K classes (tokens, or the
    teacher's best and one bucket for the rest). Returns float [N]; differentiable in log_s."""
    log_s, log_t = log_s.clamp_min(FLOOR), log_t.clamp_min(FLOOR)
    s, t = log_s.exp(), log_t.exp()
    if objective.loss == "fkl":
        return _kl(log_t, log_s)
    if objective.loss == "rkl":
        return _kl(log_s, log_t)
    if objective.loss == "jsd":
        weights = log_s.new_tensor((objective.beta, 1 - objective.beta)).log()
        log_m = torch.logaddexp(log_t + weights[0], log_s + weights[1])
        return objective.beta * _kl(log_t, log_m) + (1 - objective.beta) * _kl(log_s, log_m)
    if objective.loss == "tv":
        return (s - t).abs().sum(-1) / 2
    if objective.loss == "nla":
        return -torch.minimum(log_s, log_t).logsumexp(-1)
    share = torch.exp(-objective.eta * torch.minimum(s, t).sum(-1).detach())
    return share * _kl(log_t, log_s) + (1 - share) * (s - t).abs().sum(-1) / 2


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
