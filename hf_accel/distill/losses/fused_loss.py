"""Distillation losses from hidden states: the logits of a few rows at a time, and never again.

The head multiplies, the losses and their gradient are computed, and the gradient multiplies back, all in forward: the
products of plain training and no more (the way of Liger, 2410.10989), with one float32 sum for the head's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import row_losses
from .differentiated import Gradients
from .head import Head, wide
from .objective import Sums
from .row_losses import LossTask, RowLosses, slices

# The most bytes of a product that is made before it is added to the head's gradient.
PRODUCT_BYTES = 1 << 24


def hidden_sums(hidden: Tensor, head: Head, task: LossTask, needed: tuple[bool, ...]) -> tuple[Sums, Gradients]:
    """The sums of a task over hidden [M, H], and their gradients where they are needed: in hidden, in the head's
    weight, which is dense, and in its bias."""
    ready = head.prepared(task.size)
    gradients = _HeadGradients(hidden, head, ready, needed)
    losses = RowLosses(task, hidden, None if head.is_plain else head)
    assert isinstance(ready.weight, Tensor)
    dtype = ready.weight.dtype
    for part in slices(task.count, task.size * dtype.itemsize, row_losses.chunk_bytes(hidden.device)):
        where = task.where(part)
        states = hidden[where].to(dtype)
        logits = ready.products(states)
        # Nobody needs the logits any more, so their gradient may take their place.
        losses.add(logits, task.part(part), logits if any(needed) else None)
        gradients.add(where, states, logits)
    return losses.sums(), gradients.finished()


class _HeadGradients:
    """Gradients in hidden, weight and bias, None where they are not needed. Chunks of rows are added up, those in
    weight and bias in float32 at least."""

    def __init__(self, hidden: Tensor, head: Head, ready: Head, needed: tuple[bool, ...]) -> None:
        """ready: the head, prepared for the classes that count."""
        assert isinstance(head.weight, Tensor) and isinstance(ready.weight, Tensor)
        self._factor, self._trained = ready.weight, (head.weight, head.bias)
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(head.weight, dtype=wide(head.weight)) if needed[1] else None
        self.bias = torch.zeros_like(head.bias, dtype=wide(head.bias)) if head.bias is not None and needed[2] else None

    def add(self, where: slice | Tensor, states: Tensor, gradient: Tensor) -> None:
        """gradient: in the logits that the head made of `states`, which are the rows `where` of hidden."""
        if self.hidden is not None:
            self.hidden[where] = torch.mm(gradient, self._factor).to(self.hidden.dtype)
        if self.weight is not None:
            _add_product(self.weight[: gradient.shape[1]], gradient, states)
        if self.bias is not None:
            self.bias[: gradient.shape[1]] += gradient.sum(0, dtype=self.bias.dtype)

    def finished(self) -> Gradients:
        """The gradients, each in the dtype of the tensor that it belongs to."""
        pairs = zip((self.weight, self.bias), self._trained, strict=True)
        return [self.hidden, *(g if g is None or p is None else g.to(p.dtype) for g, p in pairs)]


def _add_product(total: Tensor, gradient: Tensor, states: Tensor) -> None:
    """total += gradient.T @ states. In half precision the product is a tensor of its own, so it is made for a few
    rows of the total at a time."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, states)
        return
    for part in slices(len(total), total.shape[1] * gradient.dtype.itemsize, PRODUCT_BYTES):
        total[part] += torch.mm(gradient[:, part].T, states)
