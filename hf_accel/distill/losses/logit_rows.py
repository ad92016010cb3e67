"""Logits of N positions, in three forms: all of them, hidden states and the head that makes them, or the best tokens.

Each kind has any leading shape, like [N] or [B, T]; `flat` makes it [N], and an index takes some of N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .closed_forms import FLOOR
from .head import Head

Index = slice | Tensor


@dataclass(frozen=True)
class DenseRows:
    """logits: [N, V], any float dtype."""

    logits: Tensor

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, index: Index) -> DenseRows:
        return DenseRows(self.logits[index])

    @property
    def shape(self) -> torch.Size:
        return self.logits.shape[:-1]

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    def flat(self) -> DenseRows:
        return DenseRows(self.logits.flatten(0, -2))

    def log_probs(self, size: int, temperature: float, dtype: torch.dtype) -> Tensor:
        """[N, size], of the first `size` tokens among themselves, softened."""
        softened = self.logits[:, :size].to(dtype, copy=True).div_(temperature)
        return torch.log_softmax(softened, -1, out=softened).clamp_min_(FLOOR)


@dataclass(frozen=True)
class PickedRows(DenseRows):
    """Of logits [M, V] the rows index, int64 [N]; nothing is copied before a part of them is taken."""

    index: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: Index) -> DenseRows:
        return DenseRows(self.logits[self.index[index]])

    @property
    def shape(self) -> torch.Size:
        return self.index.shape


@dataclass(frozen=True)
class HeadRows:
    """hidden: [N, H], what goes into the teacher's head; its logits are made when needed, for a few rows at a time."""

    hidden: Tensor
    head: Head

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, index: Index) -> HeadRows:
        return HeadRows(self.hidden[index], self.head)

    @property
    def shape(self) -> torch.Size:
        return self.hidden.shape[:-1]

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    def flat(self) -> HeadRows:
        return HeadRows(self.hidden.flatten(0, -2), self.head)

    def prepared(self, size: int) -> HeadRows:
        """Of the first `size` tokens, ready to be asked for `dense` rows, a few at a time."""
        return HeadRows(self.hidden, self.head.prepared(size))

    def dense(self) -> DenseRows:
        return DenseRows(self.head.logits(self.hidden))


@dataclass(frozen=True)
class TopRows:
    """ids: int64 [N, k], different in a row. log_probs: float [N, k], of those ids among all, softened by T; the
    probability of the rest is one bucket. vocab_size: of the teacher. excess: float [N], if the mass of the rest lies
    on some tokens drawn from it: D is too large by so much, for any student."""

    ids: Tensor
    log_probs: Tensor
    vocab_size: int
    excess: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ids.shape != self.log_probs.shape:
            raise UnsupportedError(f"ids are {list(self.ids.shape)}, but log_probs {list(self.log_probs.shape)}")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Index) -> TopRows:
        excess = None if self.excess is None else self.excess[index]
        return TopRows(self.ids[index], self.log_probs[index], self.vocab_size, excess)

    @property
    def shape(self) -> torch.Size:
        return self.ids.shape[:-1]

    def flat(self) -> TopRows:
        excess = None if self.excess is None else self.excess.flatten()
        return TopRows(self.ids.flatten(0, -2), self.log_probs.flatten(0, -2), self.vocab_size, excess)

    def classes(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """ids [N, k] and log-probabilities [N, k + 1] of those ids and of the rest, among the first `size` tokens.

        An id beyond them becomes `size`, with probability 0. What rounding leaves of a rest is at least the dtype's
        precision, unless the ids are all there is."""
        known = self.log_probs.to(dtype)
        outside = self.ids >= size
        rest = 1 - known.exp().sum(-1, keepdim=True)
        all_known = self.ids.shape[-1] >= self.vocab_size
        log_rest = torch.full_like(rest, FLOOR) if all_known else rest.clamp_min(torch.finfo(dtype).eps).log()
        log_t = torch.cat((known.masked_fill(outside, FLOOR), log_rest), -1)
        return self.ids.masked_fill(outside, size), torch.log_softmax(log_t, -1).clamp_min_(FLOOR)


Rows = DenseRows | HeadRows | TopRows
