"""The output head of a model in training, and the table of embeddings that it shares its weight with.

In a fine-tuning most rows may have no label, and their logits no gradient: the head multiplies only those that have
one. The gradients of both uses of a shared weight are added up in one tensor of its size, where torch makes three.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.cpu.library import FLOATS
from ..tensors import default_is_host, is_plain_tensor, is_recorded, is_transformed
from ..undo.journal import Mixin
from ..undo.state import FUSED
from .projections import NativeLinear, ProjectionCall

SKIPPED = 1 / 16  # the least share of rows without a gradient for which the others are copied
PART_BYTES = 1 << 24  # the most bytes of gradients that are copied at once


class Shared:
    """The gradients of the head in one use of a shared weight, by the number of the backward pass that made them."""

    def __init__(self) -> None:
        self._left: dict[int, Tensor] = {}

    def leave(self, gradient: Tensor) -> None:
        self._left[torch._C._current_graph_task_id()] = gradient

    def take(self) -> Tensor | None:
        """Return what this backward pass left; what one left that did not come to its end is dropped."""
        left, self._left = self._left.pop(torch._C._current_graph_task_id(), None), {}
        return left


class Tie:
    """One use of a weight for both the table and the head of a pass. A copy or a pickle of it begins without one."""

    def __init__(self) -> None:
        self._given: tuple[Tensor, Tensor, Shared] | None = None  # the weight, and what stands for it

    def given(self, weight: Tensor) -> Tensor:
        """Return what stands for the weight in the table; the head of the same pass gets it too."""
        shared = Shared()
        joined: Tensor = _Joined.apply(weight, shared)  # type: ignore[no-untyped-call]
        self._given = weight, joined, shared
        return joined

    def taken(self, weight: Tensor) -> tuple[Tensor, Shared | None]:
        """Return what the table was given in this pass; the weight itself if that was nothing."""
        given, self._given = self._given, None
        if given is None or given[0] is not weight or given[1].data_ptr() != weight.data_ptr():
            return weight, None
        return given[1:] if given[1].shape == weight.shape else (weight, None)

    def __reduce__(self) -> Any:
        return Tie, ()


class HeadCall(ProjectionCall):
    """The ProjectionCall of an output head. tie: that with the table; None for a weight of its own."""

    def __init__(self, float_rows: int, tie: Tie | None = None) -> None:
        super().__init__(float_rows)
        self.tie = tie

    def __reduce__(self) -> Any:
        return HeadCall, (self.float_rows, self.tie)


def _is_learning(*tensors: Tensor | None) -> bool:
    """Return whether these need a gradient, of backward passes alone, and are numbers that we know to multiply."""
    held = [each for each in tensors if each is not None]
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in held):
        return False
    known = all(is_plain_tensor(each) and each.is_cpu and each.dtype is held[0].dtype for each in held)
    if not known or held[0].dtype not in FLOATS or torch.is_autocast_enabled("cpu") or not default_is_host():
        return False
    return not is_recorded() and not is_transformed()


class TrainedHead(NativeLinear):
    """A mixin for the nn.Linear that makes logits."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in x's dtype."""
        own: dict[str, Any] = self.__dict__
        weight, bias = (own["_parameters"].get(name) for name in ("weight", "bias"))
        if weight is not None and _is_learning(x, weight, bias) and x.shape[-1:] == weight.shape[1:]:
            tie, shared = own[FUSED].tie, None
            if tie is not None and weight.requires_grad:
                weight, shared = tie.taken(weight)
            result: Tensor = _HeadProduct.apply(shared, x, weight, bias)  # type: ignore[no-untyped-call]
            return result
        return super().forward(x)


class TiedTable(Mixin):
    """A mixin for the nn.Embedding whose weight is the head's too."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """ids [...] -> [..., size]."""
        own: dict[str, Any] = self.__dict__
        weight = own["_parameters"].get("weight")
        plain = own["max_norm"] is None and not own["scale_grad_by_freq"] and not own["sparse"]
        usual = plain and weight is not None and len(args) == 1 and not kwargs and type(args[0]) is Tensor
        if usual and args[0].is_cpu and _is_learning(weight):
            return _Lookup.apply(own[FUSED].given(weight), args[0], own["padding_idx"])  # type: ignore[no-untyped-call]
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def is_tied(table: object, head: nn.Module) -> bool:
    """Return whether a module is a plain table of embeddings with the weight of a head."""
    return type(table) is nn.Embedding and table._parameters.get("weight") is head._parameters.get("weight")


# -- gradients -----------------------------------------------------------------------------------------


class _Joined(torch.autograd.Function):
    """A weight that is used twice. Its uses have sparse gradients, and the head's product next to them in `shared`.

    The engine would make a third tensor for the sum of two.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shared: Shared) -> Tensor:
        ctx.shared = shared
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        product = ctx.shared.take()
        if not grad.is_sparse:  # of create_graph=True, or of what that made
            return grad if product is None else grad + product, None
        if product is None:
            return grad.to_dense(), None
        return product.index_add_(0, grad._indices()[0], grad._values()), None


class _Lookup(torch.autograd.Function):
    """F.embedding, whose gradient has the rows alone that were looked up."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding = weight.shape, padding
        return F.embedding(ids, weight, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ids, rows = ctx.saved_tensors[0].flatten().long(), grad.flatten(0, -2)
        if ctx.padding is not None:
            kept = (ids != ctx.padding).nonzero()[:, 0]
            ids, rows = ids[kept], rows[kept]
        if torch.is_grad_enabled():  # a sparse one cannot be differentiated once more
            return rows.new_zeros(ctx.shape).index_add(0, ids, rows), None, None
        found, places = ids.unique(return_inverse=True)
        sums = rows.new_zeros(len(found), rows.shape[1], dtype=torch.float32).index_add_(0, places, rows.float())
        return _sparse(found, sums.to(grad.dtype), ctx.shape), None, None


def _sparse(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    # By an argument of the call alone, torch 2.11 warns that nothing is checked.
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True)


class _HeadProduct(torch.autograd.Function):
    """F.linear, whose backward pass multiplies only rows that have a gradient."""

    @staticmethod
    def forward(ctx: Any, shared: Shared | None, *tensors: Tensor | None) -> Tensor:
        """tensors: x, the weight and the bias."""
        x, weight, bias = tensors
        assert x is not None and weight is not None
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.shared = bias is not None, shared
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, of_x, of_weight, of_bias = ctx.needs_input_grad
        gradient, states = grad.flatten(0, -2), x.flatten(0, -2)
        bias = gradient.sum(0) if ctx.has_bias and of_bias else None
        rows = None if torch.is_grad_enabled() else _rows_to_multiply(gradient, states)
        if rows is None:
            back = gradient.mm(weight) if of_x else None
            learned = gradient.t().mm(states) if of_weight else None
        else:
            back = _of_states(gradient, weight, rows) if of_x else None
            learned = _of_weight(gradient, states, rows) if of_weight else None
        if ctx.shared is not None and learned is not None and not torch.is_grad_enabled():
            ctx.shared.leave(learned)
            learned = _sparse(learned.new_empty(0, dtype=torch.long), learned.new_empty(0, x.shape[-1]), learned.shape)
        return None, back if back is None else back.view(x.shape), learned, bias


def _rows_to_multiply(gradient: Tensor, states: Tensor) -> Tensor | None:
    """Return the rows of a gradient [N, V] that are not all zeros; None if these are most of them.

    None too, if a state [N, H] of another row is not a number, which times zero is none either.
    """
    likely = (gradient[:, :: max(1, gradient.shape[1] // 64)] == 0).all(1)  # to read the others would tell nothing
    if likely.sum() < SKIPPED * len(likely):
        return None
    zeros = likely & (torch.linalg.vector_norm(gradient, torch.inf, dim=1) == 0)
    if zeros.sum() < SKIPPED * len(zeros) or not bool(states[zeros].isfinite().all()):
        return None
    others: Tensor = (~zeros).nonzero()[:, 0]
    return others


def _of_states(gradient: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    made = gradient.new_zeros(len(gradient), weight.shape[1])
    for part in _parts(len(rows), max(1, PART_BYTES // (gradient.shape[1] * gradient.element_size()))):
        made[rows[part]] = gradient[rows[part]].mm(weight)
    return made


def _of_weight(gradient: Tensor, states: Tensor, rows: Tensor) -> Tensor:
    states = states[rows]
    made = gradient.new_empty(gradient.shape[1], states.shape[1])
    for part in _parts(gradient.shape[1], max(1, PART_BYTES // max(1, len(rows) * gradient.element_size()))):
        torch.mm(gradient[:, part].index_select(0, rows).t(), states, out=made[part])
    return made


def _parts(size: int, most: int) -> Iterator[slice]:
    return (slice(start, start + most) for start in range(0, size, most))
