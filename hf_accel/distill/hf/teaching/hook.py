"""A forward hook that turns a training model's loss into the objective of a distillation."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....errors import UnsupportedError
from ...fused_loss import fused_loss_sums
from ...losses import divergence_sum
from ...objective import Objective
from .heads import LastHidden, check_head, head_of
from .labels import Divisor, check_reading, learnt, shifts, unwrapped
from .matching import check_fusible, check_student
from .teachers import Teacher

TARGETS = ("labels", "shift_labels", "num_items_in_batch")


class DistillationHook:
    """Between `install` and `remove` the model's loss in training mode is alpha * its own + (1 - alpha) * T^2 * D, and
    both are divided by what its own loss is divided by. In eval mode, or without gradients, the model is as it was.

    shift: whether position i learns label i + 1; None to read it from the model's loss.
    fused: never hold logits [B, T, V]: the model is asked for one position's, and both losses are computed from hidden
    states. What TRL's SFTTrainer calls with fused_lm_head=True, which has no logits, learns so in any case.

    ce, kd: both parts of each micro-batch's loss, detached, as they are added up; whoever reads them clears them.
    is_divided: by the labels of the whole step, not of the micro-batch. items: where a trainer divides by itself, what
    it divides by, set before the forward pass (for ce and kd alone).
    """

    def __init__(
        self, teacher: Teacher, objective: Objective, *, shift: bool | None = None, fused: bool = False
    ) -> None:
        self.teacher, self.objective, self.shift, self.fused = teacher, objective, shift, fused
        self.ce: list[Tensor] = []
        self.kd: list[Tensor] = []
        self.is_divided = False
        self.items: Any = None
        self._model: Any = None
        self._handles: list[Any] = []
        self._begin()

    def prepare(self, model: Any, tokenizer: Any = None) -> None:
        """Before training. Raises UnsupportedError if the teacher cannot teach this model. tokenizer: its own."""
        check_student(model)
        shifts(model)
        if self.fused:
            check_fusible(model, self.teacher)
        if tokenizer is not None:
            self.teacher.check_tokenizer(tokenizer)
        self.teacher.check(model, self.objective)
        self._model = model
        self._begin()

    def _begin(self) -> None:
        self._divisor = Divisor()
        self._is_checked = False
        self._inputs: dict[str, Any] = {}
        self._hidden: LastHidden | None = None
        self._answered = self._learnt = False
        self.ce.clear()
        self.kd.clear()

    def install(self, model: Any) -> None:
        """A second time changes nothing."""
        if model is not self._model:
            self.prepare(model)
        if not self._handles and self.objective.alpha != 1:
            self._answered = self._learnt = False
            self._handles = [
                model.register_forward_pre_hook(_not_compiled(self._before), with_kwargs=True),
                model.register_forward_hook(_not_compiled(self._after), with_kwargs=True),
            ]

    @property
    def is_installed(self) -> bool:
        return bool(self._handles)

    def remove(self) -> None:
        """Leaves the model as it was. A second time changes nothing."""
        while self._handles:
            self._handles.pop().remove()
        self._release()

    def _release(self) -> None:
        self._inputs = {}
        if self._hidden is not None:
            self._hidden.remove()
            self._hidden = None

    def confirm(self) -> None:
        """After a backward pass: raises UnsupportedError if it did not go through the loss that was given."""
        if self.objective.alpha == 1 or self._learnt:
            return
        what = "did not learn from" if self._answered else "never asked for"
        raise UnsupportedError(
            f"the trainer {what} the loss of {type(unwrapped(self._model)).__name__}.forward: it computes one of its "
            "own, so the teacher had no say; use hf_accel.DistillationTrainer, or hf_accel.distillation_loss in your "
            "own compute_loss"
        )

    def _is_active(self, model: Any) -> bool:
        return bool(model.training) and torch.is_grad_enabled()

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_active(model):
            return None
        self._release()
        self._inputs = inputs = {**_named(model, args), **kwargs}
        _labels(inputs)
        if inputs.get("fused_lm_head") or self.fused:
            self._hidden = LastHidden(model)
        if self.fused and not inputs.get("fused_lm_head"):
            return (), {**{key: value for key, value in inputs.items() if key not in TARGETS}, "logits_to_keep": 1}
        self._divisor.watch(kwargs)
        return args, kwargs

    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self._is_active(model):
            return None
        try:
            inputs = self._inputs
            if inputs.get("fused_lm_head"):
                name, mixed = "log_probs", self._mix_log_probs(model, inputs, output)
            elif self.fused:
                name, mixed = "loss", self._mix_hidden(model, inputs, output)
            else:
                name, mixed = "loss", self._mix_logits(model, inputs, output)
        finally:
            self._release()
        output[name] = mixed
        self._answered = True
        mixed.register_hook(self._on_backward)
        return output

    def _on_backward(self, gradient: Tensor) -> None:
        self._learnt = True

    def _tell(self, ce: Any, kd: Any, is_divided: bool) -> None:
        self.ce.append(torch.as_tensor(ce).detach().float())
        self.kd.append(torch.as_tensor(kd).detach().float())
        self.is_divided = is_divided

    def _read(self, model: Any, inputs: dict[str, Any], shape: torch.Size) -> tuple[Tensor, Tensor, bool]:
        """Which positions learn, what, and whether the labels were shifted for it. shape: of what predicts them."""
        shift = inputs.get("shift_labels") is None and (shifts(model) if self.shift is None else self.shift)
        select, chosen = learnt(_labels(inputs), shift)
        if select.shape != shape:
            raise UnsupportedError(
                f"the student predicts {tuple(shape)} and its labels are {tuple(select.shape)}: prompt tuning, whose "
                "virtual tokens predict too, and logits_to_keep cannot be distilled here; LoRA can"
            )
        return select, chosen, shift

    def _mix_logits(self, model: Any, inputs: dict[str, Any], output: Any) -> Tensor:
        """The model's own loss and the teacher's share."""
        _check_output(output)
        own, logits = output.loss, output.logits
        select, chosen, shift = self._read(model, inputs, logits.shape[:-1])
        self._settle(inputs, output, shift, len(chosen))
        if not len(chosen):  # a mean over no label is not a number: plain training would go on with it
            return own if bool(torch.isfinite(own)) else logits.float().sum() * 0.0
        divisor = self._divisor.of(inputs.get("num_items_in_batch"), len(chosen))
        select = select.to(logits.device)
        rows = self.teacher.rows(with_decoder_inputs(model, inputs), select)
        kd = divergence_sum(logits, rows, self.objective, select=select) / divisor
        balance = _balance(model, output, own.device)
        self._tell(own - balance, kd, bool(self._divisor.is_given))
        return self.objective.alpha * own + (1 - self.objective.alpha) * (kd + balance)

    def _settle(self, inputs: dict[str, Any], output: Any, shift: bool, count: int) -> None:
        """Once: what the own loss is divided by, and whether it reads the labels as we do."""
        summed = self._divisor.settle(output.loss)
        if self._is_checked or not count or self.shift is not None:
            return
        self._is_checked = True
        if summed is None and getattr(output, "aux_loss", None) is None:
            summed = output.loss.detach() * count
        if summed is not None and inputs.get("shift_labels") is None:
            check_reading(summed, output.logits, inputs["labels"].to(output.logits.device), shift)

    def _mix_hidden(self, model: Any, inputs: dict[str, Any], output: Any) -> Tensor:
        """Both losses from hidden states, as the model's own would be divided."""
        assert self._hidden is not None
        hidden, head = self._hidden.value, head_of(model)
        assert head is not None  # check_fusible
        select, chosen, _ = self._read(model, inputs, hidden.shape[:-1])
        with self._hidden.autocast():
            if not self._is_checked:
                check_head(model, head, hidden, output.logits)
                self._is_checked = True
            index, select = select.flatten().nonzero()[:, 0].to(hidden.device), select.to(hidden.device)
            rows = self.teacher.compact_rows(with_decoder_inputs(model, inputs), select) if len(chosen) else None
            targets = chosen.to(hidden.device)
            sums = fused_loss_sums(hidden.flatten(0, -2), head, rows, self.objective, targets, index=index)
        items = inputs.get("num_items_in_batch")
        divisor = max(len(chosen), 1) if items is None else items
        self._tell(sums.ce / divisor, sums.kd / divisor, items is not None)
        return sums.total / divisor + _balance(model, output, hidden.device)

    def _mix_log_probs(self, model: Any, inputs: dict[str, Any], output: Any) -> Tensor:
        """SFTTrainer's loss is minus the sum of log_probs, divided by the labels: each label gets an equal share of
        the teacher's part, whose sum is right."""
        assert self._hidden is not None
        hidden, head = self._hidden.value, head_of(model)
        if head is None:
            raise UnsupportedError(f"{type(unwrapped(model)).__name__} has no head to distil under fused_lm_head=True")
        select, chosen, _ = self._read(model, inputs, hidden.shape[:-1])
        log_probs, count = output.log_probs, max(len(chosen), 1)
        if not len(chosen):
            return self.objective.alpha * log_probs
        with self._hidden.autocast():
            index, select = select.flatten().nonzero()[:, 0].to(hidden.device), select.to(hidden.device)
            rows = self.teacher.compact_rows(inputs, select)
            only = replace(self.objective, alpha=0.0)
            kd = fused_loss_sums(hidden.flatten(0, -2), head, rows, only, index=index).total
        divisor = count if self.items is None else self.items
        self._tell(-log_probs.sum() / divisor, kd / divisor, self.items is not None)
        share = kd / count * output.label_mask
        return self.objective.alpha * log_probs - (1 - self.objective.alpha) * share


def _not_compiled(hook: Any) -> Any:
    """A compiled model's graph breaks here. Nothing is compiled before dynamo is imported, which takes long."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def _check_output(output: Any) -> None:
    missing = [name for name in ("loss", "logits") if getattr(output, name, None) is None]
    if missing:
        raise UnsupportedError(
            f"{type(output).__name__} has no {' and no '.join(missing)}, and both are needed. Liger's fused loss "
            "keeps no logits (liger_kernel_config={'fused_linear_cross_entropy': False}); tuples need return_dict=True"
        )


def _named(model: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments of a forward by their names."""
    return dict(zip(inspect.signature(unwrapped(model).forward).parameters, args, strict=False)) if args else {}


def _labels(inputs: dict[str, Any]) -> Tensor:
    labels = inputs.get("shift_labels")
    labels = inputs.get("labels") if labels is None else labels
    if labels is None:
        raise UnsupportedError(
            f"the model was called in training without labels (it got {', '.join(inputs)}), so its loss is computed "
            "elsewhere: a compute_loss_func or label smoothing takes them away. Leave these out, or use "
            "hf_accel.distillation_loss in the compute_loss_func"
        )
    return labels


def with_decoder_inputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The teacher's decoder reads what the student's does, which the student's own forward makes of its labels."""
    inner = unwrapped(model)
    if not getattr(inner.config, "is_encoder_decoder", False) or inputs.get("decoder_input_ids") is not None:
        return inputs
    if not hasattr(inner, "prepare_decoder_input_ids_from_labels"):
        raise UnsupportedError(
            f"{type(inner).__name__} does not tell what its decoder reads, and the teacher's must read the same; put "
            "decoder_input_ids into the batch (DataCollatorForSeq2Seq(tokenizer, model=model))"
        )
    return {**inputs, "decoder_input_ids": inner.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])}


def _balance(model: Any, output: Any, device: torch.device) -> Any:
    """The part of a mixture of experts' loss that keeps its experts busy: no label is in it, so it stays whole."""
    share = getattr(unwrapped(model), "router_aux_loss_coef", None)
    aux = getattr(output, "aux_loss", None)
    return share * aux.to(device) if share is not None and isinstance(aux, Tensor) else 0.0
