"""The distance of a student from its teacher, measured while it is evaluated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..losses.closed_forms import agreement
from ..losses.distillation_loss import divergence_sum
from ..losses.logit_rows import DenseRows, Rows
from ..losses.objective import Objective
from ..losses.positions import learnt
from ..teachers.labels import is_shifted, labels_of
from ..teachers.teacher import Teacher
from .hook import with_decoder_inputs

# So many rows of logits are compared at a time, in float32.
ROWS_AT_ONCE = 256


class EvaluationMeter:
    """Sums over the labels of the batches that a model in evaluation mode is given; its outputs stay as they are."""

    def __init__(self, teacher: Teacher, objective: Objective, shift: bool | None, device: torch.device) -> None:
        self.shift = shift
        self.teacher, self.objective = teacher, objective
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # divergence, acceptance, count
        self.has_acceptance = True

    def watching(self, model: Any) -> RemovableHandle:
        """Count the batches that the model is given, until the handle is removed or its block left."""
        handle: RemovableHandle = model.register_forward_hook(self._after, with_kwargs=True)
        return handle

    def metrics(self, sums: Tensor, prefix: str) -> dict[str, float]:
        """sums: over all processes."""
        kd, acceptance, count = sums.tolist()
        if not count:
            return {}
        found = {f"{prefix}_kd_loss": kd / count}
        return found | ({f"{prefix}_acceptance": acceptance / count} if self.has_acceptance else {})

    def _after(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        logits = getattr(output, "logits", None)
        if model.training or kwargs.get("labels") is None or logits is None:
            return
        select = learnt(labels_of(kwargs), is_shifted(model, kwargs, self.shift))[0].to(logits.device)
        if select.shape != logits.shape[:-1] or not select.any():
            return
        with torch.no_grad():
            self._add(logits[select], self.teacher.rows(with_decoder_inputs(model, kwargs), select))

    def _add(self, student: Tensor, teacher: Rows) -> None:
        kd = divergence_sum(student, teacher, self.objective)
        acceptance = 0.0
        if isinstance(teacher, DenseRows):
            size = min(student.shape[-1], teacher.vocab_size)
            logits = (rows[:, :size].split(ROWS_AT_ONCE) for rows in (teacher.logits, student))
            acceptance = sum(agreement(t, s, 1.0)[0].sum().item() for t, s in zip(*logits, strict=True))
        self.has_acceptance &= isinstance(teacher, DenseRows)
        found = [kd.item(), acceptance, len(student)]
        self.sums += torch.tensor(found, dtype=torch.float64, device=self.sums.device)
