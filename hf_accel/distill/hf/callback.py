"""Distillation in an unmodified Trainer."""

from __future__ import annotations

from os import PathLike
from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from ...config import checked_keywords
from ...errors import UnsupportedError
from ..objective import Objective
from .teaching.hook import DistillationHook
from .teaching.means import LossMeans
from .teaching.steps import StepGuard, calling_trainer, refuse
from .teaching.teachers import Teacher, as_teacher


class DistillationCallback(TrainerCallback):
    """One line in a Trainer: its model learns from `teacher` too.

        Trainer(..., callbacks=[hf_accel.DistillationCallback(teacher, alpha=0.5, temperature=2.0, loss="fkl")])

    teacher: a transformers model (patched or quantized by hf_accel, in any float dtype), "base" for a LoRA student
    without its adapters, or a TeacherCache or its folder. Asked once for each micro-batch, without gradients; it is
    never a part of the student, its state dict or its checkpoints.
    alpha, temperature, loss, beta, eta: see Objective; alpha is the share of the student's own loss, and alpha=1 is
    plain training, bit for bit. shift: whether position i learns label i + 1; None to read it from the model.
    fused: never hold logits [B, T, V], of the student or the teacher: both losses are computed from the last hidden
    states, a few rows at a time. For causal language models; other code that reads the logits in training finds one
    position's. In SFTTrainer, which does without logits, this is the way in any case.

    The gradient is that of the objective over all labels of a step, however gradient accumulation divides it.
    Evaluation is untouched: eval_loss is the model's own. ce_loss and kd_loss appear in the logs, for every reporter.
    Raises UnsupportedError when training begins if the teacher cannot teach the student (another vocabulary, other
    classes), or if the trainer would not use the model's own loss (label smoothing, compute_loss_func, Liger's fused
    loss, DataParallel); in the first step, if a subclass computes its own.
    """

    @checked_keywords(teacher_model="teacher=", lmbda="a DistillationTrainer")
    def __init__(
        self,
        teacher: PreTrainedModel | Teacher | str | PathLike[str],
        *,
        alpha: float = 0.5,
        temperature: float = 2.0,
        loss: str = "fkl",
        beta: float = 0.5,
        eta: float = 3.0,
        shift: bool | None = None,
        fused: bool = False,
    ) -> None:
        objective = Objective(alpha, temperature, loss, beta, eta)
        self._hook = DistillationHook(as_teacher(teacher), objective, shift=shift, fused=fused)
        self._steps = StepGuard(self._hook)
        self._means = LossMeans()
        self._is_guarded = False

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._lead(calling_trainer(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.disarm()
        trainer = calling_trainer(self)
        refuse(args, trainer)
        self._lead(trainer)
        self._hook.prepare(kwargs["model"], kwargs.get("processing_class"))
        self._means.clear()
        self._is_guarded = trainer is not None
        if trainer is not None:
            self._steps.arm(trainer, self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._is_guarded:
            self._hook.install(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._means.end_step(self._hook)
        if not self._is_guarded:
            self._hook.remove()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return  # of an evaluation, or of a script
        means = self._means.take(args)
        logs.update(means)
        if state.log_history:
            state.log_history[-1].update(means)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.disarm()

    def _lead(self, trainer: Any) -> None:
        """To the front: reporters (W&B, TensorBoard) stand before a user's callbacks and would log without us."""
        if trainer is None:
            return
        callbacks = trainer.callback_handler.callbacks
        if any(isinstance(other, DistillationCallback) and other is not self for other in callbacks):
            raise UnsupportedError("two DistillationCallbacks in one Trainer: one teacher can be followed at a time")
        callbacks.remove(self)
        callbacks.insert(0, self)
