"""From hidden states to logits, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...tensors import product_dtype


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
        """[N, V] of hidden [N, H]; float32 or float64 where scaled or capped."""
        products = self.products(hidden)
        return products if self.is_plain else self.finish_(widen(products))

    def products(self, hidden: Tensor) -> Tensor:
        """hidden @ weight.T + bias, [N, V], of a head that is prepared."""
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
