"""The one autograd function of the losses: their gradients are computed along with their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .objective import Sums

Gradients = list[Tensor | None]


def differentiated(compute: Callable[[tuple[bool, ...]], tuple[Sums, Gradients]], *inputs: Tensor | None) -> Sums:
    """Return the result of `compute`, with a total that is differentiable in `inputs`.

    compute: gets one bool for each input, whether its gradient is needed, and returns the sums and the gradient of the
        total in each input, None where it is not needed.
    """
    return Sums(*_Differentiated.apply(compute, *inputs))  # type: ignore[no-untyped-call]


class _Differentiated(torch.autograd.Function):
    """Keeps the gradients instead of anything that they could be computed from."""

    @staticmethod
    def forward(ctx: Any, compute: Any, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        sums, gradients = compute(ctx.needs_input_grad[1:])
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums.ce, sums.kd)
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if saved is None else _scaled(saved, grad) for saved in ctx.saved_tensors)


def _scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """saved * factor, in place if no later backward pass can need `saved` again.

    Autograd takes `saved` for a constant and would leave it out of a second derivative, so that is refused.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError("create_graph=True: these losses can be differentiated once, not twice")
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return saved * factor if kept is None or kept() else saved.mul_(factor)
