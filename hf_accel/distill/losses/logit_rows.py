"""Logits of N positions, in three forms: all of them, hidden states and the head that makes them, or the best tokens.

Each kind has any leading shape, like [N] or [B, T]; `flat` makes it [N], and an index takes some of N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...tensors import product_dtype
from .objective import FLOOR

Index = slice | Tensor


@dataclass(frozen=True)
class Indexed:
    """The base of all kinds. The first field is a tensor of the leading shape and one dimension more; every
    tensor among the fields begins with the leading shape."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Index) -> Self:
        return self.with_each(lambda tensor: tensor[index])

    @property
    def shape(self) -> torch.Size:
        first: Tensor = next(iter(vars(self).values()))
        return first.shape[:-1]

    def flat(self) -> Self:
        last = len(self.shape) - 1
        return self.with_each(lambda tensor: tensor.flatten(0, last))

    def with_each(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **changed)


@dataclass(frozen=True)
class DenseRows(Indexed):
    """logits: [N, V], any float dtype."""

    logits: Tensor

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    def log_probs(self, size: int, temperature: float, dtype: torch.dtype) -> Tensor:
        """[N, size]: log-probabilities of the first `size` tokens among themselves, softened by the temperature."""
        softened = self.logits[:, :size].to(dtype, copy=True).div_(temperature)
        return torch.log_softmax(softened, -1, out=softened).clamp_min_(FLOOR)


@dataclass(frozen=True)
class PickedRows(DenseRows):
    """The rows `index`, int64 [N], of logits [M, V]. Nothing is copied before a part of them is taken."""

    index: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.index.shape

    def __getitem__(self, index: Index) -> DenseRows:  # type: ignore[override]
        return DenseRows(self.logits[self.index[index]])


@dataclass(frozen=True)
class HeadRows(Indexed):
    """hidden: [N, H], what goes into the head; the logits are made when needed, for a few rows at a time."""

    hidden: Tensor
    head: Head

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    def prepared(self, size: int) -> HeadRows:
        """The same for the first `size` tokens, ready to be asked for `dense` rows, a few at a time."""
        return HeadRows(self.hidden, self.head.prepared(size))

    def dense(self) -> DenseRows:
        return DenseRows(self.head.logits(self.hidden))


@dataclass(frozen=True)
class TopRows(Indexed):
    """The best tokens, and all other tokens as one.

    ids: int64 [N, k], different in a row. log_probs: float [N, k], of those ids among all tokens, softened by T.
    vocab_size: of the teacher. excess: float [N], given if some of the ids were drawn from the rest, and stand for all
    of it: D is then too large by so much, for any student.
    """

    ids: Tensor
    log_probs: Tensor
    vocab_size: int
    excess: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ids.shape != self.log_probs.shape:
            raise UnsupportedError(f"ids are {list(self.ids.shape)}, but log_probs {list(self.log_probs.shape)}")

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


@dataclass(frozen=True)
class Head:
    """logits = cap(scale * (hidden @ weight.T + bias)), cap(x) = softcap * tanh(x / softcap).

    weight: float [V, H], or, for a teacher, whatever maps [N, H] to [N, V]: a head without dense weights (quantized)
    is called on the rows. It brings its own bias, and num_classes says its V. scale: logit_scale of Cohere,
    1 / logits_scaling of Granite, lm_head_multiplier of Falcon-H1. softcap: final_logit_softcapping of Gemma 2.
    """

    weight: Tensor | Callable[[Tensor], Tensor]
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    num_classes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.weight, Tensor):
            self._check(self.weight)
        elif self.num_classes is None:
            raise UnsupportedError("a head that is called, not multiplied with, needs num_classes: its logits per row")
        elif self.bias is not None:
            raise UnsupportedError("a head that is called adds its own bias; leave bias out")
        if self.softcap is not None and not self.softcap > 0:
            raise UnsupportedError(f"softcap={self.softcap}: above 0, or None for none")

    def _check(self, weight: Tensor) -> None:
        if weight.dim() != 2 or not weight.is_floating_point():
            kind = f"{weight.dtype} {list(weight.shape)}"
            raise UnsupportedError(f"the head's weight is {kind}: float [V, H] is needed, or something to call")
        if self.bias is not None and self.bias.shape != weight.shape[:1]:
            raise UnsupportedError(f"the head's bias is {list(self.bias.shape)}, its weight {list(weight.shape)}")
        if self.num_classes not in (None, len(weight)):
            raise UnsupportedError(f"num_classes={self.num_classes}, but the head's weight has {len(weight)} rows")

    @property
    def vocab_size(self) -> int:
        return len(self.weight) if isinstance(self.weight, Tensor) else self.num_classes or 0

    def prepared(self, size: int) -> Head:
        """The first `size` classes, in the dtype that their products are made in here and now."""
        if not isinstance(self.weight, Tensor):
            return replace(self, num_classes=size)
        dtype = product_dtype(self.weight)
        bias = None if self.bias is None else self.bias[:size].to(dtype)
        return replace(self, weight=self.weight[:size].to(dtype), bias=bias, num_classes=None)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [N, V] of hidden [N, H]; float32 or float64 where scaled or capped."""
        products = self.products(hidden)
        return products if self.is_plain else self.finish_(widen(products))

    def products(self, hidden: Tensor) -> Tensor:
        """The products hidden @ weight.T + bias, [N, V], of a head that is prepared."""
        if not isinstance(self.weight, Tensor):
            return self.weight(hidden)[..., : self.num_classes]
        with torch.autocast(hidden.device.type, enabled=False):  # it would keep its own copy of the weight
            return torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)

    @property
    def is_plain(self) -> bool:
        return self.scale == 1 and self.softcap is None

    def finish_(self, products: Tensor) -> Tensor:
        """Scale and cap in place."""
        if self.scale != 1:
            products.mul_(self.scale)
        if self.softcap is not None:
            products.div_(self.softcap).tanh_().mul_(self.softcap)
        return products

    def unfinish_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn, in place, the gradient in the logits into that in the products."""
        if self.softcap is not None:
            gradient.addcmul_(gradient * logits, logits, value=-1 / self.softcap**2)
        return gradient.mul_(self.scale) if self.scale != 1 else gradient


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which losses are computed and gradients added up: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """A copy in that dtype."""
    return x.to(wide(x), copy=True)
