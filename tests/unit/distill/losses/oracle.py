"""Distillation written as plainly as it can be: whole tensors, torch's own losses, autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_accel.distill.losses.logit_rows import Head
from hf_accel.distill.losses.objective import Objective


def distance(log_s: Tensor, log_t: Tensor, objective: Objective) -> Tensor:
    """D of each row, as the formulas are printed; log_s and log_t must be finite."""
    s, t = log_s.exp(), log_t.exp()
    kl = torch.nn.functional.kl_div
    forward = kl(log_s, log_t, reduction="none", log_target=True).sum(-1)
    total_variation = 0.5 * (s - t).abs().sum(-1)
    if objective.loss == "fkl":
        return forward
    if objective.loss == "rkl":
        return kl(log_t, log_s, reduction="none", log_target=True).sum(-1)
    if objective.loss == "jsd":
        log_m = (objective.beta * t + (1 - objective.beta) * s).log()
        to_t = kl(log_m, log_t, reduction="none", log_target=True).sum(-1)
        to_s = kl(log_m, log_s, reduction="none", log_target=True).sum(-1)
        return objective.beta * to_t + (1 - objective.beta) * to_s
    if objective.loss == "tv":
        return total_variation
    if objective.loss == "nla":
        return -(1 - total_variation).log()
    share = torch.exp(-objective.eta * (1 - total_variation)).detach()
    return share * forward + (1 - share) * total_variation


def softened(logits: Tensor, objective: Objective) -> Tensor:
    return torch.log_softmax(logits / objective.temperature, -1)


def with_rest(log_probs: Tensor, ids: Tensor) -> Tensor:
    """[N, V] to [N, k + 1]: those of ids, and of all others together."""
    chosen = torch.zeros_like(log_probs, dtype=torch.bool).scatter_(-1, ids, True)
    rest = log_probs.masked_fill(chosen, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((log_probs.gather(-1, ids), rest), -1)


def total(
    student: Tensor, teacher: Tensor, objective: Objective, labels: Tensor | None = None, *, ids: Tensor | None = None
) -> Tensor:
    """alpha * sum of CE + (1 - alpha) * T^2 * sum of D of logits [N, V]; ids [N, k]: of the teacher's best, the others
    in one class."""
    log_s, log_t = softened(student, objective), softened(teacher, objective)
    if ids is not None:
        log_s, log_t = with_rest(log_s, ids), with_rest(log_t, ids)
    kd = objective.temperature**2 * distance(log_s, log_t, objective).sum()
    if labels is None:
        return (1 - objective.alpha) * kd
    ce = torch.nn.functional.cross_entropy(student, labels, reduction="sum")
    return objective.alpha * ce + (1 - objective.alpha) * kd


def logits_of(hidden: Tensor, head: Head) -> Tensor:
    logits = head.scale * torch.nn.functional.linear(hidden, head.weight, head.bias)
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Of the largest entry."""
    scale = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    return ((found.to(expected.dtype) - expected).abs().max() / scale).item()
