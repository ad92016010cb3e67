"""Distillation losses of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .divergence import divergence
from .objective import Objective
from .rows import DenseRows, Rows, TopRows
from .top_logits import SampledRows


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    alpha: float = 0.5,
    temperature: float = 2.0,
    loss: str = "fkl",
    beta: float = 0.5,
    eta: float = 3.0,
    shift: bool = True,
    num_items: Tensor | int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """alpha * CE + (1 - alpha) * T^2 * D(teacher, student): the mean over the labels that are not ignore_index."""
    objective = Objective(alpha, temperature, loss, beta, eta)
    if shift:
        student_logits, teacher_logits, labels = student_logits[:, :-1], teacher_logits[:, :-1], labels[:, 1:]
    valid = labels != ignore_index
    student, chosen = student_logits[valid], labels[valid]
    if not len(chosen):
        return student_logits.sum() * 0.0
    items = len(chosen) if num_items is None else num_items
    ce = torch.nn.functional.cross_entropy(student.float(), chosen, reduction="sum")
    return (alpha * ce + (1 - alpha) * divergence_sum(student, DenseRows(teacher_logits[valid]), objective)) / items


def divergence_sum(student_logits: Tensor, teacher: Rows, objective: Objective) -> Tensor:
    """T^2 times the sum of D over N rows. student_logits: [N, V]; scalar float32."""
    size = min(student_logits.shape[-1], teacher.vocab_size)
    log_s = torch.log_softmax(student_logits[:, :size].float() / objective.temperature, -1)
    if isinstance(teacher, TopRows):
        top = log_s.gather(-1, teacher.ids)
        log_s, log_t = _with_rest(top), _with_rest(teacher.log_probs.float())
    else:
        log_t = torch.log_softmax(teacher.logits[:, :size].float() / objective.temperature, -1)
    value = divergence(log_s, log_t, objective)
    if isinstance(teacher, SampledRows):
        value = value - teacher.excess
    return objective.temperature**2 * value.sum()


def _with_rest(log_probs: Tensor) -> Tensor:
    rest = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat((log_probs, rest.clamp_min(1e-12).log()), -1)
