"""Refuses trainings whose loss is not the student's own, so that a teacher's share cannot be a part of it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from transformers import Trainer

from ...errors import UnsupportedError

# Libraries whose trainers' losses are known. All others are watched: see DistillationHook.confirm.
KNOWN_LIBRARIES = ("transformers", "trl")
# Methods that make the loss of a step, and where it is the model's own: in Trainer, and in TRL's SFTTrainer.
METHODS = ("training_step", "compute_loss")
MODELS_OWN = ("transformers.trainer", "trl.trainer.sft_trainer")


def refuse_loss(trainer: Trainer) -> None:
    """Raises UnsupportedError for a trainer of TRL's, or a subclass of one, that computes a loss of its own."""
    for method in METHODS:
        owner = next(
            kind for kind in type(trainer).__mro__ if method in vars(kind) and _library(kind) in KNOWN_LIBRARIES
        )
        if owner.__module__ not in MODELS_OWN:
            raise UnsupportedError(
                f"{type(trainer).__name__} computes a loss of its own ({owner.__name__}.{method} of "
                f"{owner.__module__}), and not its model's cross entropy, so that a teacher would have no say, or a "
                "wrong one; distil in transformers' Trainer, TRL's SFTTrainer or hf_accel.DistillationTrainer, "
                "before or after it"
            )


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


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
    """Raises UnsupportedError for what a Trainer is given and under which a model does not tell its loss or logits."""
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
