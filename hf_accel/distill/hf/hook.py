"""A forward hook that turns a training model's loss into the objective of a distillation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..losses import divergence_sum
from ..objective import Objective
from .teachers import Teacher


class DistillationHook:
    """Between `install` and `remove` the model's loss in training mode is alpha * its own + (1 - alpha) * T^2 * D."""

    def __init__(self, teacher: Teacher, objective: Objective) -> None:
        self.teacher, self.objective = teacher, objective
        self._handle: Any = None
        self.ce: list[Tensor] = []
        self.kd: list[Tensor] = []

    def install(self, model: Any) -> None:
        self.teacher.check(model, self.objective)
        self._handle = model.register_forward_hook(self._after, with_kwargs=True)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not model.training or self.objective.alpha == 1:
            return None
        labels = kwargs["labels"]
        select = labels.new_zeros(labels.shape).bool()
        select[:, :-1] = labels[:, 1:] != -100
        items = kwargs.get("num_items_in_batch")
        items = select.sum() if items is None else items
        rows = self.teacher.rows(kwargs, select)
        kd = divergence_sum(output.logits[select], rows, self.objective) / items
        self.ce.append(output.loss.detach())
        self.kd.append(kd.detach())
        output["loss"] = self.objective.alpha * output.loss + (1 - self.objective.alpha) * kd
        return output
