"""Distillation in an unmodified Trainer, and the trainings that it refuses, since their loss is not the student's
own."""

from __future__ import annotations

import sys
from os import PathLike
from types import FrameType
from typing import Any

from transformers import PreTrainedModel, Trainer, TrainerCallback

from ...errors import UnsupportedError
from ...generation.hf.model_runner import weights_changed
from ...keywords import checked_keywords
from ..losses.objective import Objective
from ..teachers.as_teacher import as_teacher, load_teacher, names_model
from ..teachers.teacher import Teacher, takes_teacher_model
from .hook import DistillationHook
from .logs import Averages

# Libraries whose trainers' losses are known. All others are watched: see DistillationHook.confirm.
KNOWN_LIBRARIES = ("transformers", "trl")
# Methods that make the loss of a step, and where it is the model's own: in Trainer, and in TRL's SFTTrainer.
METHODS = ("training_step", "compute_loss")
MODELS_OWN = ("transformers.trainer", "trl.trainer.sft_trainer")


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


def refuse_loss(trainer: Trainer) -> None:
    """Raise UnsupportedError for a trainer of TRL's, or a subclass of one, that computes a loss of its own."""
    for method in METHODS:
        owner = next(
            kind
            for kind in type(trainer).__mro__
            if method in vars(kind) and kind.__module__.partition(".")[0] in KNOWN_LIBRARIES
        )
        if owner.__module__ not in MODELS_OWN:
            raise UnsupportedError(
                f"{type(trainer).__name__} computes a loss of its own ({owner.__name__}.{method} of "
                f"{owner.__module__}), and not its model's cross entropy, so that a teacher would have no say, or a "
                "wrong one; distil in transformers' Trainer, TRL's SFTTrainer or hf_accel.DistillationTrainer, "
                "before or after it"
            )


def running_trainer() -> Trainer | None:
    """The Trainer that has called this function's caller, however indirectly. A callback is given none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            return found
        frame = frame.f_back
    return None


def refuse_settings(args: Any, compute_loss_func: Any = None) -> None:
    """Raise UnsupportedError for what a Trainer is given and under which a model does not tell its loss or logits."""
    if args.label_smoothing_factor:
        raise UnsupportedError(
            f"label_smoothing_factor={args.label_smoothing_factor} takes the labels from the model, and the teacher's "
            "softened answers are a better smoothing: set it to 0"
        )
    if getattr(args, "loss_type", None) == "dft":
        raise UnsupportedError("loss_type='dft' weighs tokens by their own probability: distil with loss_type='nll'")
    if compute_loss_func is not None:
        raise UnsupportedError(
            "compute_loss_func takes the labels from the model, so its loss cannot be mixed with the teacher's: leave "
            "it out, or call hf_accel.distillation_loss in it"
        )
    liger = args.liger_kernel_config or {}
    if args.use_liger_kernel and liger.get("fused_linear_cross_entropy", True):
        raise UnsupportedError(
            "use_liger_kernel=True fuses the head into the loss and keeps no logits: give "
            "liger_kernel_config={'fused_linear_cross_entropy': False}"
        )
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"{args.n_gpu} GPUs in one process (DataParallel) copy the model at each step, without its hooks: start "
            "one process for each GPU (accelerate launch, torchrun), or set CUDA_VISIBLE_DEVICES to one"
        )
