"""Distillation in an unmodified Trainer."""

from __future__ import annotations

from os import PathLike
from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from ...generation.hf.model_runner import weights_changed
from ...keywords import checked_keywords
from ..losses.objective import Objective
from ..teachers.as_teacher import as_teacher, load_teacher, names_model
from ..teachers.teacher import Teacher, takes_teacher_model
from .averages import Averages
from .hook import DistillationHook
from .refused_losses import refuse_loss, refuse_settings, running_trainer


class DistillationCallback(TrainerCallback):
    """One line in a Trainer: its model learns from a teacher too.

        Trainer(..., callbacks=[hf_accel.DistillationCallback(teacher, alpha=0.5, temperature=2.0, loss="fkl")])

    teacher_model: a transformers model (patched or quantized by hf_accel, in any float dtype), its name or path, which
    is loaded when training begins, "base" for a LoRA student without its adapters, or a TeacherCache or its folder.
    It is asked once for each micro-batch, without gradients; it is never a part of the student, its state dict or its
    checkpoints.
    alpha, temperature, loss, beta, eta: see Objective; alpha is the share of the student's own loss, and alpha=1 is
    plain training, bit for bit. shift: whether position i learns label i + 1; None to read it from the model.
    fused: never hold logits [B, T, V], of the student or the teacher: both losses are computed from the last hidden
    states, a few rows at a time. For causal language models; other code that reads the logits in training finds one
    position's. In SFTTrainer, which does without logits, this is the way in any case.

    The gradient is that of the objective over all labels of a step, however gradient accumulation divides it.
    Evaluation is untouched: eval_loss is the model's own. ce_loss and kd_loss appear in the Trainer's log history and
    printed logs, and reach each callback that stands after this one. A Trainer puts the reporters that report_to names
    before all callbacks: give their callbacks after this one (callbacks=[DistillationCallback(...),
    TensorBoardCallback()], report_to="none"), or use a DistillationTrainer, whose logs reach all.

    Raises UnsupportedError when training begins if the teacher cannot teach the student (another vocabulary, other
    classes), or if the trainer would not use the model's own loss (label smoothing, compute_loss_func, Liger's fused
    loss, DataParallel, all of TRL's trainers but SFTTrainer); in the first step, if a subclass computes one, or weighs
    tokens, or if two callbacks teach one model.
    """

    @takes_teacher_model
    @checked_keywords(lmbda="a DistillationTrainer")
    def __init__(
        self,
        teacher_model: PreTrainedModel | Teacher | str | PathLike[str],
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
        self._named = teacher_model if names_model(teacher_model) else None  # loaded when the student is known
        teacher: Any = None if self._named is not None else as_teacher(teacher_model)
        self._hook = DistillationHook(teacher, objective, shift=shift, fused=fused)
        self._averages = Averages(["ce_loss", "kd_loss"] if alpha < 1 else [])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = running_trainer()
        if trainer is not None:
            refuse_loss(trainer)
        refuse_settings(args, getattr(trainer, "compute_loss_func", None))
        self._hook.remove()
        if self._named is not None and self._hook.teacher is None:
            self._hook.teacher = load_teacher(self._named, kwargs["model"], args.device)
        self._hook.prepare(kwargs["model"], kwargs.get("processing_class"))
        self._averages.clear()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hook.install(kwargs["model"])
        self._averages.begin()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hook.confirm()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hook.confirm()
        self._hook.remove()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hook.remove()
        self._hook.report(self._averages)
        weights_changed(kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # The logs of an evaluation, and those that a script writes, have no loss.
        if logs is None or "loss" not in logs:
            return
        means = self._averages.take(args, self._hook.is_divided)
        logs.update(means)
        if state.log_history:
            state.log_history[-1].update(means)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hook.remove()
