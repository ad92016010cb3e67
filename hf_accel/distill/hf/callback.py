"""Distillation in an unmodified Trainer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from ..objective import Objective
from .hook import DistillationHook
from .teachers import ModelTeacher, Teacher


class DistillationCallback(TrainerCallback):
    """One line in a Trainer: its model learns from `teacher` too.

    Trainer(..., callbacks=[hf_accel.DistillationCallback(teacher, alpha=0.5, temperature=2.0, loss="fkl")])
    """

    def __init__(
        self,
        teacher: PreTrainedModel | Teacher,
        *,
        alpha: float = 0.5,
        temperature: float = 2.0,
        loss: str = "fkl",
        beta: float = 0.5,
        eta: float = 3.0,
    ) -> None:
        source = teacher if isinstance(teacher, Teacher) else ModelTeacher(teacher)
        self._hook = DistillationHook(source, Objective(alpha, temperature, loss, beta, eta))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hook.install(kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._hook.kd and state.log_history:
            found = {"ce_loss": self._hook.ce, "kd_loss": self._hook.kd}
            state.log_history[-1].update({name: torch.stack(values).mean().item() for name, values in found.items()})
            self._hook.ce.clear()
            self._hook.kd.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hook.remove()
