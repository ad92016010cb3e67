"""DistillationTrainer, and the mixin that makes a trainer of any Trainer that distils."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from ...errors import UnsupportedError
from ...generation.hf.model_runner import weights_changed
from ...models import unwrapped
from ..teachers.as_teacher import load_teacher
from ..teachers.live import BaseTeacher, ModelTeacher
from ..teachers.teacher import Teacher, takes_teacher_model
from .callback import DistillationCallback, refuse_loss, refuse_settings
from .hook import DistillationHook
from .logs import Averages, EvaluationMeter
from .on_policy import StudentSampler
from .settings import DistillationSettings
from .transfer import Projections, Transfer, load_projections, save_projections

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class DistillationMixin(_Base):
    """Mixed in front of Trainer, Seq2SeqTrainer, or one of TRL's, it makes the model learn from a teacher too.

        class KD(hf_accel.DistillationMixin, SFTTrainer): ...
        KD(student, teacher_model=teacher, args=SFTConfig(...), distillation=hf_accel.DistillationSettings(alpha=0.5))

    model, args and all the rest are those of that trainer. teacher_model: a PreTrainedModel, its name or path, "base"
    for a LoRA student without its adapters, or a TeacherCache or its folder. distillation: the settings; not needed
    where args is a DistillationConfig, or another config that DistillationSettings is mixed into.

    Losses are logged as ce_loss, kd_loss, hidden_loss and attention_loss, each without its weight and averaged as
    Trainer averages `loss`; evaluation reports CE as eval_loss, and eval_kd_loss and eval_acceptance as well.

    Several processes give what one gives with average_tokens_across_devices=True (Trainer's default); without it each
    process divides by its own tokens, so that one with few of them counts as much as one with many.

    Several processes on the CPU: `ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2`, or
    torchrun (with --cpu, accelerate starts only one). Samples differ from those that one process draws. The last
    evaluation batch is filled up with rows from the first, which then count twice.

    Raises UnsupportedError for settings that cannot be had together.
    """

    @takes_teacher_model
    def __init__(
        self,
        model: Any = None,
        *rest: Any,
        teacher_model: PreTrainedModel | Teacher | str | Path,
        distillation: DistillationSettings | None = None,
        **keywords: Any,
    ) -> None:
        given = keywords.get("args", rest[0] if rest else None)
        settings = distillation or given
        if not isinstance(settings, DistillationSettings):
            raise UnsupportedError(
                f"args is a {type(given).__name__}, which says nothing of distillation: give a DistillationConfig, "
                f"or distillation=DistillationSettings(...) as well"
            )
        self.distillation: DistillationSettings = settings
        super().__init__(model, *rest, **keywords)
        self._teacher = load_teacher(teacher_model, self.model, self.args.device, settings.teacher_init_kwargs)
        transfers = settings.hidden_weight > 0 or settings.attention_weight > 0
        self._transfer = Transfer(self._teacher, settings, self.args.seed) if transfers else None
        given = {"shift": settings.shift, "fused": settings.fused, "transfer": self._transfer}
        self._hook = DistillationHook(self._teacher, settings.objective(), **given)
        self._sampler: StudentSampler | None = None
        if settings.lmbda:
            self._sampler = StudentSampler.of(settings, self.args.seed, self.model, self.processing_class)
        self._averages = Averages(self._named_losses())

    # -- training --------------------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._distilling():
            return super()._inner_training_loop(*args, **kwargs)

    @contextmanager
    def _distilling(self) -> Iterator[None]:
        """Put hooks and projections on the model inside the block; they are gone after it, also after an exception."""
        self._averages.clear()
        try:
            if self._learns_logits or self._transfer is not None:
                refuse_loss(self)
                refuse_settings(self.args, self.compute_loss_func)
                self._refuse_callbacks()
                self._hook.objective = self._objective(sampled=self._sampler is not None)
                if self._learns_logits:
                    self._hook.prepare(self.model, self.processing_class)
                else:
                    self._hook.begin(self.model)
                self._hook.install(self.model)
                self._check_optimizer()
            yield
        finally:
            self._hook.remove()
            self._note_step()

    def _note_step(self) -> None:
        """Note that the optimizer has written to the weights."""
        assert self.model is not None
        weights_changed(self.model)

    def _refuse_callbacks(self) -> None:
        if any(isinstance(callback, DistillationCallback) for callback in self.callback_handler.callbacks):
            raise UnsupportedError(
                f"a DistillationCallback in a {type(self).__name__}, which follows a teacher by itself: take it out"
            )

    def _named_losses(self) -> list[str]:
        settings = self.distillation
        logged = ["ce_loss", "kd_loss"] if self._learns_logits else []
        inside = {"hidden_loss": settings.hidden_weight, "attention_loss": settings.attention_weight}
        return [*logged, *(name for name, weight in inside.items() if weight)]

    @property
    def _learns_logits(self) -> bool:
        return self.distillation.alpha < 1 or self._sampler is not None

    def _objective(self, sampled: bool) -> Any:
        """A student's own samples are no labels: on them the loss is the distance from the teacher alone."""
        objective = self.distillation.objective()
        return dataclasses.replace(objective, alpha=0.0) if sampled else objective

    @property
    def _projections(self) -> Projections | None:
        return None if self._transfer is None else self._transfer.projections

    def _check_optimizer(self) -> None:
        if self._projections is None or self.optimizer is None:
            return
        known = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if any(id(parameter) not in known for parameter in self._projections.parameters()):
            raise UnsupportedError(
                "optimizers=: the student is not as wide as its teacher, and the projections learned between them are "
                "not in this optimizer; let the trainer make it, or set hidden_weight=0"
            )

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take Trainer's step, and keep both parts of the loss for the log."""
        self._hook.items = num_items_in_batch
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._hook.confirm()
        self._hook.report(self._averages, self.current_gradient_accumulation_steps)
        if self._transfer is not None:
            share = 1.0 if self._hook.is_divided else 1 / self.current_gradient_accumulation_steps
            for name, value in self._transfer.last.items():
                self._averages.add(name, value, share)
            self._transfer.last.clear()
        return loss

    # -- on-policy -------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The batches of an optimizer step and the number of their labels; in a share of the steps, the student's own
        samples."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        step = self.state.global_step
        self._note_step()
        sampled = bool(batches) and self._sampler is not None and self._sampler.takes(step)
        self._averages.begin(sampled)
        if self._learns_logits:
            self._hook.objective = self._objective(sampled)
        if sampled and self._sampler is not None:
            student = unwrapped(self.model, keep_adapters=True)
            batches = self._sampler.batches(student, batches, step, self.args.process_index)
            items = self._get_num_items_in_batch(batches, device)
            self._averages.count(batches)
        return batches, items

    # -- logs and metrics ------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what Trainer logs, and the losses that the logged one is made of."""
        if "loss" in logs:
            logs = {**logs, **self._averages.take(self.args, self._hook.is_divided)}
        super().log(logs, *args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as Trainer does, and also ask the teacher; its answers change no metric of Trainer's own."""
        asked = self.distillation.eval_kd
        arguments = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if asked is False or (asked is None and not isinstance(self._teacher, ModelTeacher | BaseTeacher)):
            return super().evaluation_loop(*arguments)
        meter = EvaluationMeter(
            self._teacher, self.distillation.objective(), self.distillation.shift, self.args.device
        )
        with meter.watching(self.model):
            output = super().evaluation_loop(*arguments)
        sums = self.accelerator.reduce(meter.sums, reduction="sum")
        found = meter.metrics(sums, metric_key_prefix)
        return output._replace(metrics={**(output.metrics or {}), **found})

    # -- checkpoints -----------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._projections is not None and self.args.should_save:
            save_projections(self._projections, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._projections is not None and checkpoint is not None:
            load_projections(self._projections, checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)


class DistillationTrainer(DistillationMixin, Trainer):
    """transformers' Trainer, whose model learns from a teacher too; see DistillationMixin.

    DistillationTrainer(student, teacher_model=teacher, args=DistillationConfig("out", alpha=0.5), train_dataset=...)
    """
