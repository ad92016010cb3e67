"""Losses of rows of logits and their gradient, a few rows at a time: no more than TILE_BYTES of each intermediate.

The rows are given, or made of hidden states a few at a time and never again: the head multiplies, the losses and their
gradient are computed, and the gradient multiplies back, all in forward. These are the products of plain training and
no more (the way of Liger, 2410.10989), with one float32 sum for the head's gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .logit_rows import DenseRows, Head, HeadRows, Rows, TopRows, wide, widen
from .objective import FLOOR, Objective, Sums, value_and_gradient

# The most bytes of one intermediate on each thread of a CPU, so that it stays in the thread's cache.
TILE_BYTES = 1 << 20
# The most bytes of logits that a head makes at once: enough rows to multiply well.
CHUNK_BYTES = 1 << 25
# The most bytes of either on other devices, where a few large kernels are faster.
OTHER_DEVICE_BYTES = 1 << 28
# The most bytes of a product that is made before it is added to the head's gradient.
PRODUCT_BYTES = 1 << 24


def slices(rows: int, row_bytes: int, budget: int) -> Iterator[slice]:
    """0 to rows, in pieces of at most `budget` bytes, but of one row at least; sizes differ by one row at most."""
    most = max(1, budget // max(1, row_bytes))
    pieces = -(-rows // most)
    edges = [rows * i // pieces for i in range(pieces + 1)] if pieces else []
    return (slice(a, b) for a, b in itertools.pairwise(edges))


def chunk_bytes(device: torch.device) -> int:
    return CHUNK_BYTES if device.type == "cpu" else OTHER_DEVICE_BYTES


def tile_bytes(device: torch.device) -> int:
    return TILE_BYTES * torch.get_num_threads() if device.type == "cpu" else OTHER_DEVICE_BYTES


@dataclass(frozen=True)
class LossTask:
    """The inputs of the losses of `count` rows.

    size: the number of classes that count, from the first on. teacher: the teacher's output for these rows, with a
    prepared head, or None without D.
    targets: int64 [count], classes, or None for no cross entropy. index: int64 [count], the student's rows that these
    are, or None for all.
    """

    objective: Objective
    size: int
    count: int
    teacher: Rows | None = None
    targets: Tensor | None = None
    index: Tensor | None = None

    def where(self, part: slice) -> slice | Tensor:
        """The student's rows that the rows `part` of the task are."""
        return part if self.index is None else self.index[part]

    def part(self, part: slice) -> LossTask:
        """The task of the rows `part`, whose student is cut out already."""
        teacher = None if self.teacher is None else self.teacher[part]
        targets = None if self.targets is None else self.targets[part]
        return LossTask(self.objective, self.size, part.stop - part.start, teacher, targets)


def logit_sums(logits: Tensor, task: LossTask, needed: tuple[bool, ...]) -> tuple[Sums, Gradients]:
    """The sums of a task over logits [M, V], and their gradient in the logits, in their dtype, if it is needed."""
    gradient = torch.zeros_like(logits) if needed[0] else None
    losses = RowLosses(task, logits)
    losses.add(logits, task, gradient)
    return losses.sums(), [gradient]


class RowLosses:
    """Cross entropy and T^2 * D, ce and kd, of each row of a task, in the order in which `add` is given them.

    like: any tensor of the student's. head: of a student whose logits are not finished (scaled, capped) yet.
    """

    def __init__(self, task: LossTask, like: Tensor, head: Head | None = None) -> None:
        self.objective, self.size, self.head = task.objective, task.size, head
        # Results kept tile by tile would split the heap's free blocks, and tiles would no longer fit where the last
        # ones were. So there is one tensor for all of them.
        self.ce, self.kd = (like.new_zeros(task.count, dtype=wide(like)) for _ in range(2))
        self._done = 0

    def add(self, logits: Tensor, task: LossTask, gradient: Tensor | None) -> None:
        """Add some rows: logits [M, >= size] and their task. gradient: a buffer like logits, perhaps logits itself,
        for alpha * dCE + (1 - alpha) * T^2 * dD; nothing is written to rows that the task leaves out."""
        for part in slices(task.count, 4 * self.size, chunk_bytes(logits.device)):
            answers = None if task.teacher is None else task.teacher[part]
            answers = answers.dense() if isinstance(answers, HeadRows) else answers
            for tile in slices(part.stop - part.start, 4 * self.size, tile_bytes(logits.device)):
                rows = slice(part.start + tile.start, part.start + tile.stop)
                where = task.where(rows)
                targets = None if task.targets is None else task.targets[rows]
                z = widen(logits[where, : self.size])
                found = self._tile(z, targets, None if answers is None else answers[tile], gradient is not None)
                self._done += len(z)
                if gradient is not None:
                    gradient[where, : self.size] = 0 if found is None else found.to(gradient.dtype)

    def sums(self) -> Sums:
        ce, kd, alpha = self.ce.sum(), self.kd.sum(), self.objective.alpha
        # A part without a share is left out, since 0 * inf is not a number.
        shares = [share * part for share, part in ((alpha, ce), (1 - alpha, kd)) if share]
        return Sums(torch.stack(shares).sum(), ce, kd)

    def _tile(
        self, z: Tensor, targets: Tensor | None, teacher: DenseRows | TopRows | None, wanted: bool
    ) -> Tensor | None:
        """Return the gradient in the rows z [n, size], which may be overwritten; None if it is not wanted."""
        if self.head is not None:
            self.head.finish_(z)
        gradient = self._divergence(z, teacher, wanted) if teacher is not None else None
        if targets is not None:
            gradient = self._cross_entropy(z, targets, wanted, gradient)
        if self.head is not None and gradient is not None:
            self.head.unfinish_(gradient, z)
        return gradient

    def _put(self, results: Tensor, values: Tensor) -> None:
        results[self._done : self._done + len(values)] = values

    def _cross_entropy(self, z: Tensor, targets: Tensor, wanted: bool, gradient: Tensor | None) -> Tensor | None:
        chosen = targets[:, None]
        log_p = torch.log_softmax(z, -1)
        self._put(self.ce, log_p.gather(-1, chosen).neg_()[:, 0])
        alpha = self.objective.alpha
        if not wanted or not alpha:
            return gradient
        p = log_p.exp_().scatter_add_(-1, chosen, log_p.new_full(chosen.shape, -1.0))
        return p.mul_(alpha) if gradient is None else gradient.add_(p, alpha=alpha)

    def _divergence(self, z: Tensor, teacher: DenseRows | TopRows, wanted: bool) -> Tensor | None:
        t, weight = self.objective.temperature, 1 - self.objective.alpha
        y = z / t
        if isinstance(teacher, TopRows):
            value, gradient = self._top(y, teacher, wanted)
            value = value if teacher.excess is None else value.sub_(teacher.excess)
        else:
            value, gradient = self._dense(y, teacher)
        self._put(self.kd, value.mul_(t * t))
        return gradient.mul_(weight * t) if wanted and weight else None

    def _dense(self, y: Tensor, teacher: DenseRows) -> tuple[Tensor, Tensor]:
        log_t = teacher.log_probs(self.size, self.objective.temperature, y.dtype)
        log_s = torch.log_softmax(y, -1, out=y).clamp_min_(FLOOR)
        return value_and_gradient(log_s, log_t, self.objective)

    def _top(self, y: Tensor, teacher: TopRows, wanted: bool) -> tuple[Tensor, Tensor]:
        """The rest of the student's vocabulary is one class, whose gradient its tokens share as they share its
        probability."""
        ids, log_t = teacher.classes(self.size, y.dtype)
        beyond = teacher.vocab_size > self.size
        y = torch.nn.functional.pad(y, (0, 1), value=-torch.inf) if beyond else y  # where ids beyond `size` go
        top = y.gather(-1, ids)
        y.scatter_(-1, ids, -torch.inf)
        rest = y.logsumexp(-1, keepdim=True).clamp_min_(torch.finfo(y.dtype).min)
        log_s = torch.log_softmax(torch.cat((top, rest), -1), -1).clamp_min_(FLOOR)
        value, slope = value_and_gradient(log_s, log_t, self.objective)
        if wanted:
            y.sub_(rest).exp_().mul_(slope[:, -1:]).scatter_(-1, ids, slope[:, :-1])
        return value, y[:, : self.size]


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
        return None, *(None if saved is None else scaled_once(saved, grad) for saved in ctx.saved_tensors)


def scaled_once(saved: Tensor, factor: Tensor) -> Tensor:
    """Return saved * factor, in place if no later backward pass can need `saved` again.

    Autograd takes `saved` for a constant and would leave it out of a second derivative, so that is refused.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError("create_graph=True: these losses can be differentiated once, not twice")
    return saved * factor if is_graph_kept() else saved.mul_(factor)


def is_graph_kept() -> bool:
    """Return whether a later backward pass can go through the graph that a backward pass is in."""
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return kept is None or bool(kept())


def hidden_sums(hidden: Tensor, head: Head, task: LossTask, needed: tuple[bool, ...]) -> tuple[Sums, Gradients]:
    """The sums of a task over hidden [M, H], and their gradients where they are needed: in hidden, in the head's
    weight, which is dense, and in its bias."""
    ready = head.prepared(task.size)
    gradients = _HeadGradients(hidden, head, ready, needed)
    losses = RowLosses(task, hidden, None if head.is_plain else head)
    assert isinstance(ready.weight, Tensor)
    dtype = ready.weight.dtype
    for part in slices(task.count, task.size * dtype.itemsize, chunk_bytes(hidden.device)):
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
        """Begin with gradients of zero. ready: the head, prepared for the classes that count."""
        assert isinstance(head.weight, Tensor) and isinstance(ready.weight, Tensor)
        self._factor, self._trained = ready.weight, (head.weight, head.bias)
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(head.weight, dtype=wide(head.weight)) if needed[1] else None
        self.bias = torch.zeros_like(head.bias, dtype=wide(head.bias)) if head.bias is not None and needed[2] else None

    def add(self, where: slice | Tensor, states: Tensor, gradient: Tensor) -> None:
        """Add the gradient in the logits that the head made of `states`, which are the rows `where` of hidden."""
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
