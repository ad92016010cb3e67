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
from ..kernels import cpu
from ..kernels.cpu.cross_entropy import RowStatistics, cross_entropy, cross_entropy_gradient
from ..kernels.cpu.library import FLOATS
from ..tensors import default_is_host, is_recorded
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

    On a CPU there is no other tensor of the size of the logits [B, T, V], if nobody holds them any more when the
    backward pass begins: their gradient takes their place. Elsewhere there is one more, their gradient, which is
    computed with the value (the way of Liger, arXiv 2410.10989). Both are computed in float32, a few rows at a time.
    Transformers' own keeps the logits in float32, their logarithms of probabilities, and the gradients of both.

    logits: float32, bfloat16 or float16. What is not known here, and all that needs no gradient, is transformers' own.
    Returns a scalar float32, which can be differentiated twice; not on a CPU alone, as long as nobody has changed the
    logits in place.
    """
    task = _task(logits, labels, vocab_size, others)
    if task is None:
        given: tuple[Any, ...] = (logits, labels, vocab_size, num_items_in_batch)
        return ForCausalLMLoss(*given, **others)
    rows = logits.view(-1, vocab_size)
    total: Tensor = _native_sum(rows, task) if _computes(rows) else _CrossEntropy.apply(rows, task)  # type: ignore[no-untyped-call]
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


def _computes(logits: Tensor) -> bool:
    """Return whether the native library may read and write these rows."""
    plain = logits.is_cpu and logits.dtype in FLOATS and logits.is_contiguous() and hasattr(torch, "_lazy_clone")
    return plain and default_is_host() and not is_recorded() and cpu.refusal() is None


def _native_sum(logits: Tensor, task: LossTask) -> Tensor:
    """Return the sum of the cross entropies of a task, which is differentiable in the logits [N, V]."""
    assert task.index is not None and task.targets is not None
    labels = torch.full((len(logits),), -1).index_copy_(0, task.index, task.targets)
    found = cross_entropy(logits.detach(), labels)
    # A copy that torch makes when one of both is written to: whoever changes the logits leaves ours as they are, and
    # our gradient takes their memory where they are gone, or a copy of it.
    kept = torch._lazy_clone(logits)
    total: Tensor = _NativeCrossEntropy.apply(kept, task, labels, *found)  # type: ignore[no-untyped-call]
    return total


def _second_gradient(logits: Tensor, task: LossTask, grad: Tensor) -> Tensor:
    """Return the gradient of the sum in the logits as something that can be differentiated once more."""
    assert task.index is not None and task.targets is not None
    chances = logits[task.index].float().softmax(-1) - torch.nn.functional.one_hot(task.targets, task.size)
    return torch.zeros_like(logits).index_add(0, task.index, (chances * grad).to(logits.dtype))


class _NativeCrossEntropy(torch.autograd.Function):
    """The sum of the cross entropies of some rows of logits [N, V] that nobody else has."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, task: LossTask, labels: Tensor, *found: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels, *found)
        ctx.task = task
        return found[0].sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, *found = ctx.saved_tensors
        others = (None,) * (2 + len(found))
        if torch.is_grad_enabled():
            return _second_gradient(logits, ctx.task, grad), *others
        gradient = logits.clone() if is_graph_kept() else logits.detach()
        cross_entropy_gradient(gradient, labels, RowStatistics(*found), float(grad))
        return gradient, *others


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
        return _second_gradient(logits, task, grad)
