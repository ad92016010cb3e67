"""A second derivative for attention by kernels that have one derivative alone, as torch's fused ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.layouts import KV, AttentionOptions
from .reference import ReferenceBackend


def differentiable_twice(
    out: Tensor, query: Tensor, kv: KV, options: AttentionOptions, *, mask: Tensor | None
) -> Tensor:
    """Return `out`, what a backend's `dense` gave for the same arguments, as something to differentiate twice.

    In a backward pass with create_graph=True the definition is computed and differentiated; any other is the kernel's.
    What has its two derivatives anyway is returned as it is, and so is what cannot be computed once more: dropout.
    """
    by_products = options.softcap is not None or options.sinks is not None
    learnt_mask = mask is not None and mask.requires_grad
    if not out.requires_grad or by_products or learnt_mask or options.dropout:
        return out
    result: Tensor = _Again.apply(out, options, mask, query, kv.k, kv.v)  # type: ignore[no-untyped-call]
    return result


class _Again(torch.autograd.Function):
    """Hands the gradient on to the kernel that made `out`, or, if that has to be differentiated, around it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, options: AttentionOptions, mask: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.options, ctx.mask = options, mask
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grad, *(None,) * 5
        inputs = ctx.saved_tensors
        query, key, value = inputs
        out = ReferenceBackend().dense(query, KV(key, value), ctx.options, mask=ctx.mask)
        needed = [each for each in inputs if each.requires_grad]
        found = iter(torch.autograd.grad(out, needed, grad, create_graph=True))
        return None, None, None, *(next(found) if each.requires_grad else None for each in inputs)
