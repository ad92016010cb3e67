"""A forward hook that turns a training model's loss into the objective of a distillation."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..losses import divergence_sum
from ..objective import Objective
from .labels import Divisor, check_reading, learnt, shifts, unwrapped
from .matching import check_student
from .means import LossMeans
from .teachers import Teacher


class DistillationHook:
    """Between `install` and `remove` the model's loss in training mode is alpha * its own + (1 - alpha) * T^2 * D, and
    both are divided by what its own loss is divided by. In eval mode, or without gradients, the model is as it was.

    shift: whether position i learns label i + 1; None to read it from the model's loss.
    `losses` collects the two parts; `losses.last` is (ce, kd) of the newest micro-batch.
    """

    def __init__(self, teacher: Teacher, objective: Objective, *, shift: bool | None = None) -> None:
        self.teacher, self.objective, self.shift = teacher, objective, shift
        self.losses = LossMeans()
        self._model: Any = None
        self._handles: list[Any] = []
        self._begin()

    def prepare(self, model: Any, tokenizer: Any = None) -> None:
        """Before training. Raises UnsupportedError if the teacher cannot teach this model. tokenizer: its own."""
        check_student(model)
        shifts(model)
        self.teacher.tokenizer = tokenizer
        self.teacher.check(model, self.objective)
        self._model = model
        self._begin()

    def _begin(self) -> None:
        self.divisor = Divisor()
        self._reading_checked = self.shift is not None
        self._inputs: dict[str, Any] = {}
        self._answered = self._learnt = False
        self.losses.clear()

    def install(self, model: Any) -> None:
        """A second time changes nothing."""
        if model is not self._model:
            self.prepare(model)
        if not self._handles and self.objective.alpha != 1:
            self._answered = self._learnt = False
            self._handles = [
                model.register_forward_pre_hook(self._before, with_kwargs=True),
                model.register_forward_hook(self._after, with_kwargs=True),
            ]

    @property
    def is_installed(self) -> bool:
        return bool(self._handles)

    def remove(self) -> None:
        """Leaves the model as it was. A second time changes nothing."""
        while self._handles:
            self._handles.pop().remove()
        self._inputs = {}

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
        self._inputs = {**_named(model, args), **kwargs}
        self.divisor.watch(kwargs)
        return args, kwargs

    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self._is_active(model):
            return None
        inputs, self._inputs = self._inputs, {}
        labels = _labels(inputs)
        self._check_output(output)
        shift = "shift_labels" not in inputs and (shifts(model) if self.shift is None else self.shift)
        select, chosen = learnt(labels, shift)
        _check_shapes(output.logits, select)
        own: Tensor = output.loss
        self._settle(output, labels, shift, len(chosen))
        output["loss"] = self._mixed(model, inputs, output, own, select.to(output.logits.device), len(chosen))
        self._answered = True
        output["loss"].register_hook(self._on_backward)
        return output

    def _settle(self, output: Any, labels: Tensor, shift: bool, count: int) -> None:
        """Once: what the own loss is divided by, and whether it reads the labels as we do."""
        summed = self.divisor.settle(output.loss)
        if self._reading_checked or not count:
            return
        self._reading_checked = True
        if summed is None and getattr(output, "aux_loss", None) is None:
            summed = output.loss.detach() * count
        if summed is not None and labels.shape == output.logits.shape[:-1]:
            check_reading(summed, output.logits, labels.to(output.logits.device), shift)

    def _mixed(
        self, model: Any, inputs: dict[str, Any], output: Any, own: Tensor, select: Tensor, count: int
    ) -> Tensor:
        if not count:  # a mean over no label is not a number: stock would train on it
            return own if bool(torch.isfinite(own)) else output.logits.float().sum() * 0.0
        divisor = self.divisor.of(inputs.get("num_items_in_batch"), count)
        rows = self.teacher.rows(with_decoder_inputs(model, inputs), select)
        kd = divergence_sum(output.logits[select], rows, self.objective) / divisor
        alpha, balance = self.objective.alpha, _balance(model, output)
        self.losses.add(own - balance, kd, divided=bool(self.divisor.is_given))
        return alpha * own + (1 - alpha) * (kd + balance)

    def _on_backward(self, gradient: Tensor) -> None:
        self._learnt = True

    def _check_output(self, output: Any) -> None:
        missing = [name for name in ("loss", "logits") if getattr(output, name, None) is None]
        if missing:
            raise UnsupportedError(
                f"{type(output).__name__} has no {' and no '.join(missing)}, and both are needed. Liger's "
                "fused loss keeps no logits (liger_kernel_config={'fused_linear_cross_entropy': False}); tuples need "
                "return_dict=True"
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


def _check_shapes(logits: Tensor, select: Tensor) -> None:
    if logits.shape[:-1] != select.shape:
        raise UnsupportedError(
            f"the student's logits are {tuple(logits.shape)} and its labels {tuple(select.shape)}: prompt tuning, "
            "whose virtual tokens have logits too, and logits_to_keep cannot be distilled here; LoRA can"
        )


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


def _balance(model: Any, output: Any) -> Any:
    """The part of a mixture of experts' loss that keeps its experts busy: no label is in it, so it stays whole."""
    share = getattr(unwrapped(model), "router_aux_loss_coef", None)
    aux = getattr(output, "aux_loss", None)
    return share * aux.to(output.loss.device) if share is not None and isinstance(aux, Tensor) else 0.0
