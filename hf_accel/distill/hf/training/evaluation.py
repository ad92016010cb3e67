"""How far a student is from its teacher, while it is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...losses import divergence_sum
from ...objective import Objective
from ...rows import DenseRows, Rows
from ..teaching.hook import with_decoder_inputs
from ..teaching.labels import learnt, shifts
from ..teaching.teachers import Teacher

ROWS = 256  # of logits compared at a time: float32 of both, and what is made of them


class EvaluationMeter:
    """Sums over the labels of the batches that a model in evaluation mode is given; its outputs stay as they are."""

    def __init__(self, teacher: Teacher, objective: Objective, shift: bool | None, device: torch.device) -> None:
        self.shift = shift
        self.teacher, self.objective = teacher, objective
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # divergence, acceptance, count
        self.has_acceptance = True

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        handle = model.register_forward_hook(self._after, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @staticmethod
    def metrics(sums: Tensor, has_acceptance: bool, prefix: str) -> dict[str, float]:
        kd, acceptance, count = sums.tolist()
        if not count:
            return {}
        found = {f"{prefix}_kd_loss": kd / count}
        return found | ({f"{prefix}_acceptance": acceptance / count} if has_acceptance else {})

    def _after(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        labels, logits = kwargs.get("labels"), getattr(output, "logits", None)
        if model.training or labels is None or logits is None:
            return
        labels, shift = kwargs.get("shift_labels"), False
        if labels is None:
            labels, shift = kwargs["labels"], shifts(model) if self.shift is None else self.shift
        select = learnt(labels, shift)[0].to(logits.device)
        if select.shape != logits.shape[:-1] or not select.any():
            return
        with torch.no_grad():
            self._add(logits[select], self.teacher.rows(with_decoder_inputs(model, kwargs), select))

    def _add(self, student: Tensor, teacher: Rows) -> None:
        kd = divergence_sum(student, teacher, self.objective)
        acceptance = None
        if isinstance(teacher, DenseRows):
            acceptance = sum(
                _acceptance(s, t) for s, t in zip(student.split(ROWS), teacher.logits.split(ROWS), strict=True)
            )
        self.has_acceptance &= acceptance is not None
        found = [kd.item(), float(acceptance or 0.0), len(student)]
        self.sums += torch.tensor(found, dtype=torch.float64, device=self.sums.device)


def _acceptance(student: Tensor, teacher: Tensor) -> float:
    """The sum over rows of the chance that a token the student draws is accepted by the teacher: sum of min(p, q)."""
    size = min(student.shape[-1], teacher.shape[-1])
    p, q = (torch.softmax(x[:, :size].float(), -1) for x in (student, teacher))
    return float(torch.minimum(p, q).sum())
