"""The loss of a causal language model that is trained: transformers' own, a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import UnsupportedError
from .losses.objective import Objective
from .losses.positions import IGNORED
from .losses.row_losses import LossTask, is_graph_kept, logit_sums, scaled_once

LABELS_ALONE = Objective(alpha=1.0)


def learns_by_rows(model: PreTrainedModel) -> bool:
    """Return whether `causal_loss` can be the loss of a model: whether transformers' own for causal models is."""
    return getattr(model, "loss_function", None) in (ForCausalLMLoss, causal_loss)


def causal_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    **others: Any,
) -> Tensor:
    """Return the loss that transformers' ForCausalLMLoss returns of the same arguments, for less memory and time.

    Besides the logits [B, T, V] there is one tensor of their shape and dtype, which is their gradient. It is computed
    with the value, in float32, a few rows at a time (the way of Liger, arXiv 2410.10989). Transformers' own keeps the
    logits in float32, their logarithms of probabilities, and the gradients of both.

    logits: float32, bfloat16 or float16. What is not known here, and all that needs no gradient, is transformers' own.
    Returns a scalar float32, which can be differentiated twice as long as nobody has changed the logits in place.
    """
    task = _task(logits, labels, vocab_size, others)
    if task is None:
        given: tuple[Any, ...] = (logits, labels, vocab_size, num_items_in_batch)
        return ForCausalLMLoss(*given, **others)
    total: Tensor = _CrossEntropy.apply(logits.view(-1, vocab_size), task)  # type: ignore[no-untyped-call]
    return total / (task.count if num_items_in_batch is None else _on(total.device, num_items_in_batch))


def _task(logits: Tensor, labels: Tensor | None, size: int, others: Mapping[str, Any]) -> LossTask | None:
    """Return the rows that have a label, and their labels; None for what is left to transformers."""
    is_differentiated = torch.is_grad_enabled() and logits.requires_grad
    is_traced = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    if not is_differentiated or is_traced or type(logits) is not Tensor or logits.dtype == torch.float64:
        return None
    shifted, ignored = others.get("shift_labels"), others.get("ignore_index", IGNORED)
    if shifted is None and labels is not None:
        shifted = pad(labels, (0, 1), value=ignored)[..., 1:]
    if shifted is None or shifted.is_floating_point() or logits.shape != (*shifted.shape, size):
        return None
    targets = shifted.flatten().to(logits.device)
    index = (targets != ignored).nonzero()[:, 0]
    chosen = targets[index].long()
    if not len(chosen) or bool((chosen < 0).any() | (chosen >= size).any()):
        return None  # transformers' own is not a number then, or raises its own error
    return LossTask(LABELS_ALONE, size, len(chosen), None, chosen, index)


def _on(device: torch.device, items: Tensor | int) -> Tensor | int:
    return items.to(device) if isinstance(items, Tensor) else items


class _CrossEntropy(torch.autograd.Function):
    """The sum of the cross entropies of some rows of logits [N, V]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, task: LossTask) -> Tensor:
        sums, gradients = logit_sums(logits, task, (True,))
        ctx.save_for_backward(*gradients)
        # Not saved by torch, which would refuse a backward pass after the logits were changed in place.
        ctx.logits, ctx.version, ctx.task = logits, logits._version, task
        return sums.ce

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            return _CrossEntropy._again(ctx, grad), None
        (gradient,) = ctx.saved_tensors
        if not is_graph_kept():
            ctx.logits = None  # as torch frees what it saves; the loss may be kept
        return scaled_once(gradient, grad), None

    @staticmethod
    def _again(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient as something that can be differentiated once more."""
        logits, task = ctx.logits, ctx.task
        if logits._version != ctx.version:
            raise UnsupportedError(
                "create_graph=True: the logits were changed in place after their loss was computed; copy them first, "
                "or set model.loss_function = transformers.loss.loss_utils.ForCausalLMLoss"
            )
        rows = logits[task.index].float()
        chances = rows.softmax(-1) - torch.nn.functional.one_hot(task.targets, task.size)
        return torch.zeros_like(logits).index_add(0, task.index, (chances * grad).to(logits.dtype))
