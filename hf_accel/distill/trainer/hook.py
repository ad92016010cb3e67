"""A forward hook that turns a training model's loss into the objective of a distillation."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...models import unwrapped
from ..losses.distillation_loss import divergence_sum, loss_sums
from ..losses.logit_rows import HeadRows
from ..losses.objective import Objective, Sums
from ..losses.positions import learnt
from ..teachers.labels import Divisor, check_reading, is_shifted, labels_of, shifts
from ..teachers.live import LastHidden, check_fusible, check_head, check_student, head_of, with_decoder_inputs
from ..teachers.teacher import Teacher
from .logs import Averages
from .transfer import Transfer

TARGETS = ("labels", "shift_labels", "num_items_in_batch")
UNEQUAL = 1e-3  # the part by which rounding may let the weights of a loss's labels differ


class DistillationHook:
    """Between `install` and `remove` the model's loss in training mode is alpha * its own + (1 - alpha) * T^2 * D, and
    both are divided by what its own loss is divided by. In eval mode, or without gradients, the model is as it was.

    shift: whether position i learns label i + 1; None to read it from the model's loss.
    fused: never hold logits [B, T, V]: the model is asked for one position's, and both losses are computed from hidden
    states. A model that TRL's SFTTrainer calls with fused_lm_head=True has no logits, and learns so in any case.

    transfer: what is learnt besides from inside the teacher; with it alpha may be 1.

    is_divided: whether the loss is divided by the labels of the whole step, and not of the micro-batch. items: where a
    trainer divides by itself, what it divides by, if that is known before the forward pass; only logs depend on it.

    A forward or backward pass that fails or is interrupted leaves the hook on the model, since nobody tells a callback
    that a training broke off. The next forward pass finds that the last one did not end, takes the hook off and is
    the model's own.
    """

    def __init__(
        self,
        teacher: Teacher,
        objective: Objective,
        *,
        shift: bool | None = None,
        fused: bool = False,
        transfer: Transfer | None = None,
    ) -> None:
        self.teacher, self.objective, self.shift, self.fused = teacher, objective, shift, fused
        self.transfer = transfer
        self.is_divided = False
        self.items: Any = None
        self._handles: list[Any] = []
        self.begin(None)

    def prepare(self, model: Any, tokenizer: Any = None) -> None:
        """Check, before training, that the teacher can teach this model; otherwise raise UnsupportedError. tokenizer:
        its own."""
        check_student(model)
        shifts(model)
        if self.fused:
            check_fusible(model, self.teacher)
        self.teacher.check(model, self.objective, tokenizer)
        self.begin(model)

    def begin(self, model: Any) -> None:
        """Forget what was learnt of the model before. It replaces `prepare` if nothing is learnt from logits."""
        self._model = model
        self._divisor = Divisor()
        self._is_checked = self._is_underway = self._answered = False
        self._learnt: bool | None = None  # None before a backward pass
        self._inputs: dict[str, Any] = {}
        self._hidden: LastHidden | None = None
        self._losses: list[tuple[Tensor, Tensor, int | None]] = []

    def install(self, model: Any) -> None:
        """Put the hook on the model; a second time changes nothing. Raises UnsupportedError if another hook teaches
        it."""
        if model is not self._model:
            self.prepare(model)
        if self._handles:
            return
        self._learns_logits = self.objective.alpha < 1
        if not self._learns_logits and self.transfer is None:
            return
        for hook in list(model._forward_hooks.values()):
            other = getattr(inspect.unwrap(hook), "__self__", None)
            if isinstance(other, DistillationHook):
                if not other._is_underway:
                    raise UnsupportedError("two teachers for one model in one training: give one DistillationCallback")
                other.remove()
        if self.transfer is not None:
            self.transfer.install(model)
        self._handles = [
            model.register_forward_pre_hook(_not_compiled(self._before), with_kwargs=True),
            model.register_forward_hook(_not_compiled(self._after), with_kwargs=True),
        ]

    def remove(self) -> None:
        """Leave the model as it was. A second time changes nothing."""
        while self._handles:
            self._handles.pop().remove()
        if self.transfer is not None:
            self.transfer.remove()
        self._is_underway = False
        self._release()

    def _release(self) -> None:
        self._inputs = {}
        if self._hidden is not None:
            self._hidden.remove()
            self._hidden = None

    def confirm(self) -> None:
        """Raise UnsupportedError if the backward pass did not go through the loss that was given, or not with
        the same weight for each label, so that the teacher's share got another gradient than the objective's."""
        answered, learnt = self._answered, self._learnt
        self._answered, self._learnt = False, None
        if learnt or not self._handles:
            return
        what = "did not learn from" if answered else "never asked for"
        raise UnsupportedError(
            f"the trainer {what} the loss of {type(unwrapped(self._model)).__name__}.forward: it computes one of its "
            "own, so the teacher had no say; use hf_accel.DistillationTrainer, or hf_accel.distillation_loss in your "
            "own compute_loss"
        )

    def report(self, averages: Averages, micro_batches: int | None = None) -> None:
        """Add both parts of the losses since the last report. micro_batches: of the whole step; None for as many as
        have had labels since."""
        labels = sum(count or 0 for _, _, count in self._losses)
        for ce, kd, count in self._losses:
            share = count / labels if count else 1.0 if self.is_divided else 1 / (micro_batches or len(self._losses))
            averages.add("ce_loss", ce, share)
            averages.add("kd_loss", kd, share)
        self._losses.clear()

    # -- one pass --------------------------------------------------------------------------------------

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_learning(model):
            return None
        if self._is_underway:
            self.remove()
            return None
        self._is_underway = True
        self._inputs = inputs = {**_named(model, args), **kwargs}
        labels_of(inputs)  # raises where there are none
        if self.transfer is not None:
            self.transfer.begin()
        if self._learns_logits and (inputs.get("fused_lm_head") or self.fused):
            self._hidden = LastHidden(model)
            if not inputs.get("fused_lm_head"):
                return (), {**{key: value for key, value in inputs.items() if key not in TARGETS}, "logits_to_keep": 1}
        self._divisor.watch(kwargs)
        return args, kwargs

    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not is_learning(model):
            return None
        inputs = self._inputs
        is_summed = bool(inputs.get("fused_lm_head"))
        name = "log_probs" if is_summed else "loss"
        try:
            if self._learns_logits:
                mix = self._mix_log_probs if is_summed else self._mix_hidden if self.fused else self._mix_logits
                output[name] = mix(model, inputs, output)
            elif not is_summed:
                self._divisor.settle(output.loss)
                self.is_divided = bool(self._divisor.is_given)
            if self.transfer is not None:
                items = inputs.get("num_items_in_batch") if self.is_divided else None
                items = self.items if is_summed else items
                more, count = self.transfer.added(model, inputs, self.shift, items)
                if is_summed:
                    output[name] = output.log_probs - more / count * output.label_mask
                else:
                    output[name] = output.loss + more / (count if items is None else items)
        finally:
            self._release()
        self._answered, self._is_underway = True, False
        labels = output.label_mask.bool() if is_summed else None
        output[name].register_hook(lambda gradient: self._on_backward(gradient, labels))
        return output

    def _on_backward(self, gradient: Tensor, labels: Tensor | None) -> None:
        """Note whether the pass learns. labels: which log_probs are of a label; None where `gradient` is that of a
        loss."""
        weights = -gradient[labels] if labels is not None else gradient
        self._learnt = self._learnt is not False and is_mean(weights)
        self._is_underway = True
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._is_underway = False

    def _keep(self, ce: Any, kd: Any, is_divided: bool, count: int | None = None) -> None:
        """Keep both losses for the log. count: of the labels, where what the trainer divides by is not known yet."""
        self._losses.append((torch.as_tensor(ce).detach(), torch.as_tensor(kd).detach(), count))
        self.is_divided = is_divided

    def _read(self, model: Any, inputs: dict[str, Any], shape: torch.Size) -> tuple[Tensor, Tensor, bool]:
        """Return which positions learn, the label of each, and whether the labels were shifted for it. shape: of the
        positions that the student predicts at."""
        shift = is_shifted(model, inputs, self.shift)
        select, chosen = learnt(labels_of(inputs), shift)
        if select.shape != shape:
            raise UnsupportedError(
                f"the student predicts {tuple(shape)} and its labels are {tuple(select.shape)}: prompt tuning, whose "
                "virtual tokens predict too, and logits_to_keep cannot be distilled here; LoRA can"
            )
        return select, chosen, shift

    def _mix_logits(self, model: Any, inputs: dict[str, Any], output: Any) -> Tensor:
        """The loss made of the model's own and the teacher's share."""
        _check_output(output)
        own, logits = output.loss, output.logits
        select, chosen, shift = self._read(model, inputs, logits.shape[:-1])
        self._settle(inputs, output, shift, len(chosen))
        if not len(chosen):
            # A mean over no label is not a number, with which plain training would go on.
            return own if bool(torch.isfinite(own)) else logits.float().sum() * 0.0
        divisor = self._divisor.of(inputs.get("num_items_in_batch"), len(chosen))
        select = select.to(logits.device)
        rows = self.teacher.rows(with_decoder_inputs(model, inputs), select)
        kd = divergence_sum(logits, rows, self.objective, select=select) / divisor
        balance = _balance(model, output, own.device)
        self._keep(own - balance, kd, bool(self._divisor.is_given))
        return self.objective.alpha * own + (1 - self.objective.alpha) * (kd + balance)

    def _settle(self, inputs: dict[str, Any], output: Any, shift: bool, count: int) -> None:
        """In the first pass, find out what the model's own loss is divided by, and check that it reads the labels in
        the same way."""
        summed = self._divisor.settle(output.loss)
        if self._is_checked or not count or self.shift is not None:
            return
        self._is_checked = True
        if summed is None and getattr(output, "aux_loss", None) is None:
            summed = output.loss.detach() * count
        if summed is not None and inputs.get("shift_labels") is None:
            check_reading(summed, output.logits, inputs["labels"].to(output.logits.device), shift)

    def _mix_hidden(self, model: Any, inputs: dict[str, Any], output: Any) -> Tensor:
        """The loss made of both from hidden states, divided as the model's own would be."""
        count, sums = self._hidden_sums(model, inputs, output.logits)
        items = inputs.get("num_items_in_batch")
        divisor = max(count, 1) if items is None else items
        self._keep(sums.ce / divisor, sums.kd / divisor, items is not None)
        return sums.total / divisor + _balance(model, output, sums.total.device)

    def _mix_log_probs(self, model: Any, inputs: dict[str, Any], output: Any) -> Tensor:
        """SFTTrainer's loss is minus the sum of log_probs over the number of labels, so each label gets an equal share
        of the teacher's part, and their sum is right."""
        count, sums = self._hidden_sums(model, inputs, None)
        alpha, log_probs = self.objective.alpha, output.log_probs
        if not count:
            return alpha * log_probs
        divisor = count if self.items is None else self.items
        waits = count if self.items is None else None
        self._keep(-log_probs.sum() / divisor, sums.kd / divisor, self.items is not None, waits)
        return alpha * log_probs - (1 - alpha) * (sums.total / count * output.label_mask)

    def _hidden_sums(self, model: Any, inputs: dict[str, Any], logits: Tensor | None) -> tuple[int, Sums]:
        """Return how many labels there are, and the sums of the losses from hidden states.

        logits: the model's own of one position, which its head must make of them. None where the model has none, and
            computes the cross entropy itself: the total is then that of D alone.
        """
        hidden, head = self._hidden, head_of(model)
        if hidden is None or head is None:
            raise UnsupportedError(f"{type(unwrapped(model)).__name__} has no head to distil under fused_lm_head=True")
        states, objective, targets = hidden.value, replace(self.objective, alpha=0.0), None
        select, chosen, _ = self._read(model, inputs, states.shape[:-1])
        select = select.to(states.device)
        with hidden.autocast():
            if logits is not None:
                objective, targets = self.objective, chosen.to(states.device)
                if not self._is_checked:
                    check_head(model, head, states, logits)
                self._is_checked = True
            rows = self.teacher.rows(inputs, select, compact=True) if len(chosen) else None
            index = select.flatten().nonzero()[:, 0]
            sums = loss_sums(HeadRows(states, head).flat(), rows, objective, targets, index=index)
        return len(chosen), sums


def is_mean(weights: Tensor) -> bool:
    """Return whether a trainer's loss falls with each of the model's by the same: of log_probs, their mean or sum."""
    if not weights.numel():
        return True
    least, most = weights.min(), weights.max()
    return bool(least > 0 and most - least <= UNEQUAL * most)


def is_learning(model: Any) -> bool:
    return bool(model.training) and torch.is_grad_enabled()


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


def _balance(model: Any, output: Any, device: torch.device) -> Any:
    """The part of a mixture of experts' loss that keeps its experts busy: no label is in it, so it stays whole."""
    share = getattr(unwrapped(model), "router_aux_loss_coef", None)
    aux = getattr(output, "aux_loss", None)
    return share * aux.to(device) if share is not None and isinstance(aux, Tensor) else 0.0
