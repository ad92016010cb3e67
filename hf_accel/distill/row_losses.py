"""Losses of rows of logits and their gradient, a few rows at a time: no more than TILE_BYTES of each intermediate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from .closed_forms import value_and_gradient
from .divergence import FLOOR
from .head import Head, wide, widen
from .objective import Objective
from .rows import DenseRows, HeadRows, Rows, TopRows

TILE_BYTES = 1 << 20  # of one intermediate, on each thread of a CPU: they stay in its cache
CHUNK_BYTES = 1 << 25  # of logits that a head makes at once: enough rows to multiply well
OTHER_TILE_BYTES = OTHER_CHUNK_BYTES = 1 << 28  # elsewhere a few large kernels are faster


def slices(rows: int, row_bytes: int, budget: int) -> Iterator[slice]:
    """0 to rows in pieces of at most `budget` bytes, of one row at least, and of equal size up to one."""
    most = max(1, budget // max(1, row_bytes))
    pieces = -(-rows // most)
    edges = [rows * i // pieces for i in range(pieces + 1)] if pieces else []
    return (slice(a, b) for a, b in itertools.pairwise(edges))


def chunk_bytes(device: torch.device) -> int:
    return CHUNK_BYTES if device.type == "cpu" else OTHER_CHUNK_BYTES


def tile_bytes(device: torch.device) -> int:
    return TILE_BYTES * torch.get_num_threads() if device.type == "cpu" else OTHER_TILE_BYTES


class RowLosses:
    """Cross entropy and T^2 * D, ce and kd, of each of `count` rows, in the order in which `add` is given them.

    size: the first so many classes count. like: any tensor of the student's. head: of a student whose logits are not
    finished (scaled, capped) yet.
    """

    def __init__(self, objective: Objective, size: int, count: int, like: Tensor, head: Head | None = None) -> None:
        self.objective, self.size, self.head = objective, size, head
        self.ce, self.kd = (like.new_zeros(count, dtype=wide(like)) for _ in range(2))  # kept by tile, they would
        self._done = 0  # split the heap's free blocks, and tiles would no longer fit where the last ones were

    def add(
        self,
        logits: Tensor,
        index: Tensor | None,
        targets: Tensor | None,
        teacher: Rows | None,
        gradient: Tensor | None,
    ) -> None:
        """logits: [M, >= size]; index: int64 [N], which of them, or None for all; targets: int64 [N], or None for no
        cross entropy; teacher: of the N, or None for no D. gradient: a buffer like logits, perhaps logits itself,
        for alpha * dCE + (1 - alpha) * T^2 * dD; where no row is taken nothing is written."""
        count = len(logits) if index is None else len(index)
        if isinstance(teacher, HeadRows):
            teacher = teacher.prepared(self.size)
        for part in slices(count, 4 * self.size, chunk_bytes(logits.device)):
            said = None if teacher is None else teacher[part]
            said = said.dense() if isinstance(said, HeadRows) else said
            for tile in slices(part.stop - part.start, 4 * self.size, tile_bytes(logits.device)):
                rows = slice(part.start + tile.start, part.start + tile.stop)
                where = rows if index is None else index[rows]
                some = None if targets is None else targets[rows]
                z = widen(logits[where, : self.size])
                found = self._tile(z, some, None if said is None else said[tile], gradient is not None)
                self._done += len(z)
                if gradient is not None:
                    gradient[where, : self.size] = 0 if found is None else found.to(gradient.dtype)

    def _tile(
        self, z: Tensor, targets: Tensor | None, teacher: DenseRows | TopRows | None, wanted: bool
    ) -> Tensor | None:
        """The gradient, if wanted, of rows z [n, size] that may be overwritten."""
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
