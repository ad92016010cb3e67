"""Distillation losses from hidden states: the logits of a few rows at a time, and never again.

The head multiplies, the losses and their gradient are computed, and the gradient multiplies back, all in forward: the
products of plain training and no more (the way of Liger, 2410.10989), with one float32 sum for the head's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from . import row_losses
from .head import Head, product_dtype, wide
from .losses import check_rows
from .objective import Objective
from .positions import check_targets, find_positions, shared_size
from .row_losses import RowLosses, slices
from .rows import HeadRows, Rows
from .sums import Sums, mean, scaled, weigh

PRODUCT_BYTES = 1 << 24  # of what a chunk adds to the head's gradient, where that is made before it is added


def fused_distillation_loss(
    hidden: Tensor,
    head: Head,
    teacher: Rows | None,
    labels: Tensor | None,
    *,
    alpha: float = 0.5,
    temperature: float = 2.0,
    loss: str = "fkl",
    beta: float = 0.5,
    eta: float = 3.0,
    shift: bool = True,
    num_items: Tensor | int | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """`distillation_loss` of the logits that `head` makes of `hidden`, without ever holding them all.

    hidden: [B, T, H] or [B, H], what goes into the student's head. Differentiable in it and in head's weight and bias.
    teacher: HeadRows (its hidden states [B, T, H'] and head), DenseRows or TopRows; at all positions or at those that
        count. Not read at alpha=1, when it may be None.
    chunk_bytes: of logits at once. The rest is as in `distillation_loss`; autocast is heeded.
    """
    objective = Objective(alpha, temperature, loss, beta, eta)
    if hidden.dim() < 2:
        raise UnsupportedError(f"hidden states are {list(hidden.shape)}: [B, T, H] or [B, H] is needed")
    positions = find_positions(hidden.shape[:-1], labels, objective, shift=shift, ignore_index=ignore_index)
    if teacher is None and alpha < 1:
        raise UnsupportedError("no teacher: its rows are needed unless alpha=1")
    sums = fused_loss_sums(
        hidden.flatten(0, -2),
        head,
        None if teacher is None or alpha == 1 else positions.rows(teacher),
        objective,
        positions.targets if alpha else None,
        index=positions.index,
        size=vocab_size,
        chunk_bytes=chunk_bytes,
    )
    return mean(sums.total, len(positions), num_items)


def fused_loss_sums(
    hidden: Tensor,
    head: Head,
    teacher: Rows | None,
    objective: Objective,
    targets: Tensor | None = None,
    *,
    index: Tensor | None = None,
    size: int | None = None,
    chunk_bytes: int | None = None,
) -> Sums:
    """`loss_sums` of the logits that `head` makes of hidden [M, H]. The total is differentiable in hidden, weight and
    bias; what needs no gradient costs none. chunk_bytes: of logits at once; None: what suits the device."""
    if not isinstance(head.weight, Tensor):
        raise UnsupportedError("a student's head needs a dense weight here; for another use its logits and loss_sums")
    if hidden.dim() != 2 or hidden.shape[1] != head.weight.shape[1]:
        raise UnsupportedError(f"hidden states are {list(hidden.shape)}, the head's weight {list(head.weight.shape)}")
    size = shared_size(head.vocab_size, teacher, size)
    check_rows(len(hidden) if index is None else len(index), teacher, targets)
    if targets is not None:
        check_targets(targets, size)
    budget = chunk_bytes or row_losses.chunk_bytes(hidden.device)
    found = _FusedSums.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, head, index, targets, teacher, objective, size, budget
    )
    return Sums(*found)


class _FusedSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        index: Tensor | None,
        targets: Tensor | None,
        teacher: Rows | None,
        objective: Objective,
        size: int,
        budget: int,
    ) -> tuple[Tensor, ...]:
        ready = head.prepared(size)
        teacher = teacher.prepared(size) if isinstance(teacher, HeadRows) else teacher  # once, not for each chunk
        gradients = _Gradients(hidden, weight, bias, ready, ctx.needs_input_grad)
        count = len(hidden) if index is None else len(index)
        losses = RowLosses(objective, size, count, hidden, None if head.is_plain else head)
        for part in slices(count, size * product_dtype(weight).itemsize, budget):
            where = part if index is None else index[part]
            states = hidden[where].to(product_dtype(weight))
            logits = ready.products(states)
            some = None if targets is None else targets[part]
            losses.add(logits, None, some, None if teacher is None else teacher[part], gradients.of(logits))
            gradients.add(where, states, logits)
        sums = weigh(losses.ce.sum(), losses.kd.sum(), objective)
        ctx.save_for_backward(*gradients.finished())
        ctx.mark_non_differentiable(sums.ce, sums.kd)
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if saved is None else scaled(saved, grad) for saved in ctx.saved_tensors]
        return *found, None, None, None, None, None, None, None


class _Gradients:
    """In hidden, weight and bias: added up over chunks of rows, in float32 at least; None where none is needed."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, needed: tuple[bool, ...]
    ) -> None:
        self.head, self.parameters = head, (weight, bias)
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
    """total += gradient.T @ states. Of half precision a few rows of it at a time: their product is a tensor of its
    own."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, states)
        return
    for part in slices(len(total), total.shape[1] * gradient.dtype.itemsize, PRODUCT_BYTES):
        total[part] += torch.mm(gradient[:, part].T, states)
