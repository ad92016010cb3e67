"""Where a Trainer's steps begin and end, however they end."""

from __future__ import annotations

import functools
import sys
from typing import Any

from transformers import Trainer

from ....errors import UnsupportedError
from .hook import DistillationHook


def calling_trainer(callback: Any) -> Trainer | None:
    """The Trainer whose event `callback` handles. Events are given its model and its arguments but not itself, so the
    stack is read; None if another loop sent the event, or a callback that holds this one."""
    frame = sys._getframe(1)
    while frame is not None:
        if "self" in frame.f_code.co_varnames and isinstance(owner := frame.f_locals.get("self"), Trainer):
            return owner if callback in owner.callback_handler.callbacks else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


class StepGuard:
    """Installs a hook for the time of each `training_step` of one Trainer, and of nothing else.

    No event says that a training failed, so a hook for the time of a training would outlive it. This one is on the
    model only while `training_step` runs, and `finally` takes it off: after an error in the teacher, the model, the
    data, the optimizer, another callback, or an interrupt, the model has no hook. For the time of a training, the
    instance's own `training_step` stands before its class's.
    """

    def __init__(self, hook: DistillationHook) -> None:
        self.hook = hook
        self._trainer: Any = None

    def arm(self, trainer: Any, callback: Any) -> None:
        self.disarm()
        self._shadowed = vars(trainer).get("training_step")
        self._trainer = trainer
        trainer.training_step = self._guarded(trainer, trainer.training_step, callback)

    def disarm(self) -> None:
        self.hook.remove()
        trainer, self._trainer = self._trainer, None
        if trainer is not None and "training_step" in vars(trainer):
            if self._shadowed is None:
                del trainer.training_step
            else:
                trainer.training_step = self._shadowed
        self._shadowed = None

    def _guarded(self, trainer: Any, original: Any, callback: Any) -> Any:
        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if callback not in trainer.callback_handler.callbacks:  # taken out after a training that failed
                self.disarm()
                return original(*args, **kwargs)
            self.hook.items = args[2] if len(args) > 2 else kwargs.get("num_items_in_batch")
            try:
                self.hook.install(trainer.model)
                result = original(*args, **kwargs)
                self.hook.confirm()
            except BaseException:
                self.disarm()
                raise
            self.hook.remove()
            return result

        return training_step


def refuse(args: Any, trainer: Any) -> None:
    """Raises UnsupportedError for arguments of a Trainer under which a model does not tell its loss or its logits."""
    if args.label_smoothing_factor:
        raise UnsupportedError(
            f"label_smoothing_factor={args.label_smoothing_factor} takes the labels from the model, and the teacher's "
            "softened answers are a better smoothing: set it to 0"
        )
    if getattr(trainer, "compute_loss_func", None) is not None:
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
    if getattr(args, "loss_type", None) == "dft":
        raise UnsupportedError("loss_type='dft' weighs tokens by their own probability: distil with loss_type='nll'")
