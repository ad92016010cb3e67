"""Distillation losses from hidden states: the logits of a few rows at a time, and never again.

The head multiplies, the losses and their gradient are computed, and the gradient multiplies back, all in forward: the
products of plain training and no more (the way of Liger, 2410.10989), with one float32 sum for the head's gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import row_losses
from .head import Head, product_dtype, wide
from .logit_rows import HeadRows
from .objective import scaled, weigh
from .row_losses import LossTask, RowLosses, slices

PRODUCT_BYTES = 1 << 24  # of what a chunk adds to the head's gradient, where that is made before it is added


class FusedSums(torch.autograd.Function):
    """The sums of a LossTask over hidden [M, H]; differentiable in hidden, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, task: LossTask
    ) -> tuple[Tensor, ...]:
        """head: has this weight and bias, which are given besides for autograd to see."""
        ready = head.prepared(task.size)
        if isinstance(task.teacher, HeadRows):  # prepared once, not for each chunk
            task = replace(task, teacher=task.teacher.prepared(task.size))
        gradients = _Gradients(hidden, ready, (weight, bias), ctx.needs_input_grad)
        losses = RowLosses(task, hidden, None if head.is_plain else head)
        dtype = product_dtype(weight)
        for part in slices(task.count, task.size * dtype.itemsize, row_losses.chunk_bytes(hidden.device)):
            where = task.where(part)
            states = hidden[where].to(dtype)
            logits = ready.products(states)
            losses.add(logits, task.part(part), gradients.of(logits))
            gradients.add(where, states, logits)
        sums = weigh(losses.ce.sum(), losses.kd.sum(), task.objective)
        ctx.save_for_backward(*gradients.finished())
        ctx.mark_non_differentiable(sums.ce, sums.kd)
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if saved is None else scaled(saved, grad) for saved in ctx.saved_tensors]
        return *found, None, None


class _Gradients:
    """In hidden, weight and bias: added up over chunks of rows, in float32 at least; None where none is needed."""

    def __init__(
        self, hidden: Tensor, head: Head, parameters: tuple[Tensor, Tensor | None], needed: tuple[bool, ...]
    ) -> None:
        """head: of the classes that count, prepared. parameters: its weight and bias as they were given."""
        self.head, self.parameters = head, parameters
        weight, bias = parameters
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide(weight)) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide(bias)) if bias is not None and needed[2] else None

    def of(self, logits: Tensor) -> Tensor | None:
        """The buffer that the gradient in logits goes to: theirs, since nobody needs them any more."""
        return None if self.hidden is None and self.weight is None and self.bias is None else logits

    def add(self, where: slice | Tensor, states: Tensor, gradient: Tensor) -> None:
        """gradient: in the logits that the head made of `states`, which are the rows `where` of hidden."""
        assert isinstance(self.head.weight, Tensor)
        if self.hidden is not None:
            self.hidden[where] = torch.mm(gradient, self.head.weight).to(self.hidden.dtype)
        if self.weight is not None:
            _add_product(self.weight[: gradient.shape[1]], gradient, states)
        if self.bias is not None:
            self.bias[: gradient.shape[1]] += gradient.sum(0, dtype=self.bias.dtype)

    def finished(self) -> tuple[Tensor | None, ...]:
        """Each in the dtype of what it is the gradient of."""
        pairs = zip((self.weight, self.bias), self.parameters, strict=True)
        return self.hidden, *(g if g is None or p is None else g.to(p.dtype) for g, p in pairs)


def _add_product(total: Tensor, gradient: Tensor, states: Tensor) -> None:
    """total += gradient.T @ states. In half precision the product is a tensor of its own, so it is made for a few
    rows of the total at a time."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, states)
        return
    for part in slices(len(total), total.shape[1] * gradient.dtype.itemsize, PRODUCT_BYTES):
        total[part] += torch.mm(gradient[:, part].T, states)
