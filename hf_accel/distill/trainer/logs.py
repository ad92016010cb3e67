"""The numbers that a training logs: averages of its losses, and the distance from the teacher in an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..losses.distillation_loss import divergence_sum
from ..losses.logit_rows import DenseRows, Rows
from ..losses.objective import Objective, agreement
from ..losses.positions import learnt
from ..teachers.labels import is_shifted, labels_of
from ..teachers.live import with_decoder_inputs
from ..teachers.teacher import Teacher

# These losses are no part of a step on the student's own samples.
OFF_POLICY = {"ce_loss"}
# So many rows of logits are compared at a time, in float32.
ROWS_AT_ONCE = 256


class Averages:
    """Sums over micro-batches, divided by the optimizer steps that they are from: as Trainer logs its loss."""

    def __init__(self, names: Sequence[str]) -> None:
        """Name what is averaged: a process may have had no label and must still take part."""
        self._names, self._is_sampled = names, False
        self.clear()

    def clear(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps = self._sampled_steps = self._samples = self._tokens = 0

    def begin(self, sampled: bool = False) -> None:
        """Begin an optimizer step. sampled: on the student's own samples."""
        self._is_sampled = sampled
        self._steps += 1
        self._sampled_steps += sampled

    def add(self, name: str, value: Tensor, share: float) -> None:
        """Add a micro-batch's mean; `share` of it counts for the step."""
        if not (self._is_sampled and name in OFF_POLICY):
            known = self._sums.get(name)
            self._sums[name] = value.double() * share + (0.0 if known is None else known)

    def count(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Count the samples of a step."""
        self._samples += sum(len(batch["labels"]) for batch in batches)
        self._tokens += sum(int((batch["labels"] != -100).sum()) for batch in batches)

    def take(self, args: Any, is_divided: bool) -> dict[str, float]:
        """Return the averages to log, the same on every process, and begins again.

        args: of the Trainer. is_divided: whether losses are divided by the labels of the whole step, and not by those
        of the micro-batch.
        """
        nothing = torch.zeros((), dtype=torch.float64, device=args.device)
        steps = {name: self._steps - self._sampled_steps * (name in OFF_POLICY) for name in self._names}
        names = [name for name in self._names if steps[name]]
        counts = [torch.tensor(float(n), dtype=torch.float64) for n in (self._samples, self._tokens)]
        local = [self._sums.get(name, nothing) for name in names] + counts
        found = reduce(torch.stack([x.to(args.device) for x in local]), reduction="sum").tolist()
        # Where each process divides by the labels of all of them, their sum is the mean.
        processes = 1 if is_divided and args.average_tokens_across_devices else args.world_size
        logs = {name: found[i] / processes / steps[name] for i, name in enumerate(names)}
        samples, tokens = found[len(names) :]
        if self._sampled_steps:
            logs |= {"on_policy_steps": float(self._sampled_steps), "on_policy_tokens": tokens}
            logs["on_policy_length"] = tokens / samples
        self.clear()
        return logs


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
        """Return the metrics of sums over all processes."""
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
