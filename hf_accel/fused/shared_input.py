"""Layers that are called on one tensor (q, k and v; gate and up): the first call computes all of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .products import Products, native


@dataclass
class Pending:
    """Results that are still to be asked for."""

    x: Tensor
    version: int
    results: dict[int, Tensor]


class SharedInput:
    """The layers, in the order in which their parent calls them.

    The weights are read once for all, and the input is quantized once. A layer that is called on another tensor,
    or on this one after it was written to, is computed alone: the result never depends on the sharing.
    """

    def __init__(self, layers: list[nn.Module], float_rows: int) -> None:
        self.layers = layers
        self.products = Products(float_rows)
        self.pending: Pending | None = None

    def take(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """The layer's result on x, or None if it is to be computed alone."""
        if not native(x):
            return None
        index = next(i for i, other in enumerate(self.layers) if other is layer)
        if index == 0:
            self.pending = self._compute(x)
        pending = self.pending
        if pending is None or pending.x is not x or pending.version != _version(x) or index not in pending.results:
            return None
        result = pending.results.pop(index)
        if not pending.results:
            self.pending = None
        return result

    def _compute(self, x: Tensor) -> Pending | None:
        call = self.products.call(tuple(self.layers), x)
        if call is None:
            return None
        out = call(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        parts = out.split([int(layer.out_features) for layer in self.layers], dim=-1)  # type: ignore[arg-type,no-untyped-call]
        return Pending(x, _version(x), dict(enumerate(parts)))

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"pending": None}


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
