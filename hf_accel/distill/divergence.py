"""The distances between two distributions, in plain torch: the oracle of every faster form."""

from __future__ import annotations

import torch
from torch import Tensor

from .objective import Objective


def divergence(log_s: Tensor, log_t: Tensor, objective: Objective) -> Tensor:
    """D(teacher, student) of each row. log_s, log_t: float [N, K] log-probabilities, K classes (tokens, or the
    teacher's best and one bucket for the rest). Returns float [N]; differentiable in log_s."""
    s, t = log_s.exp(), log_t.exp()
    if objective.loss == "fkl":
        return _kl(log_t, log_s)
    if objective.loss == "rkl":
        return _kl(log_s, log_t)
    if objective.loss == "jsd":
        log_m = (objective.beta * t + (1 - objective.beta) * s).log()
        return objective.beta * _kl(log_t, log_m) + (1 - objective.beta) * _kl(log_s, log_m)
    if objective.loss == "tv":
        return (s - t).abs().sum(-1) / 2
    acceptance = torch.minimum(s, t).sum(-1)
    if objective.loss == "nla":
        return -acceptance.log()
    share = torch.exp(-objective.eta * acceptance.detach())
    return share * _kl(log_t, log_s) + (1 - share) * (s - t).abs().sum(-1) / 2


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
