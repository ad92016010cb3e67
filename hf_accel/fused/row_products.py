"""Products of few rows with several quantized weights on a GPU, in one launch: of attention, and of a gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..linear import QuantLinear
from ..linear.backends.triton import MOST_SHARED_ROWS, Triton, shared_tile
from ..tensors import is_recorded, product_dtype
from .projections import is_bare_linear


class RowWeights(NamedTuple):
    """Packed weights of one layout, the biases that are added, and the tile of the rows."""

    weights: list[Any]
    biases: Sequence[Tensor | None]
    tile: Any


def products_of_rows(linears: Sequence[nn.Module], x: Tensor) -> list[Tensor] | None:
    """Compute the linear layers of x [B, T, in], each [B, T, out], in one launch; None if that cannot be done.

    The sums may be added in another order than by the layers one by one.
    """
    found = _weights_of(linears, x)
    if found is None:
        return None
    from ..kernels.triton.together import together_launch

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    outs = [rows.new_empty(len(rows), weight.out_features) for weight in found.weights]
    together_launch(rows, found.weights, found.biases, outs, tile=found.tile).run()
    return [out.view(*x.shape[:-1], -1) for out in outs]


def gated_product_of_rows(linears: Sequence[nn.Module], x: Tensor, activation: str) -> Tensor | None:
    """Compute activation(first(x)) * second(x), [B, T, out], in one launch; see products_of_rows.

    activation: a name of ACTIVATIONS.
    """
    found = _weights_of(linears, x)
    if found is None or len({weight.out_features for weight in found.weights}) > 1:
        return None
    from ..kernels.triton.layer_parts import GATES
    from ..kernels.triton.together import together_launch

    if activation not in GATES:
        return None
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = rows.new_empty(len(rows), found.weights[0].out_features)
    together_launch(rows, found.weights, found.biases, [out], tile=found.tile, activation=activation).run()
    return out.view(*x.shape[:-1], -1)


def _weights_of(linears: Sequence[nn.Module], x: Tensor) -> RowWeights | None:
    if len(linears) < 2 or x.numel() > MOST_SHARED_ROWS * x.shape[-1] or torch.is_grad_enabled() or is_recorded():
        return None
    weights, biases = [], []
    for linear in linears:
        if type(linear) is not QuantLinear or not is_bare_linear(linear):
            return None
        packed = _packed_for(linear, x)
        if packed is None or type(backend_of(linear)) is not Triton:
            return None
        weights.append(packed)
        biases.append(linear.added_bias)
    from ..kernels.triton.together import go_together

    settings = {(backend_of(linear).row_invariant, backend_of(linear).rounding) for linear in linears}
    if len(settings) > 1 or not go_together(weights) or product_dtype(x) is not x.dtype:
        return None
    tile = shared_tile(x.numel() // x.shape[-1], weights, x.dtype, backend_of(linears[0]))
    return None if tile is None else RowWeights(weights, biases, tile)


def _packed_for(linear: QuantLinear, x: Tensor) -> Any:
    """Return the packed weight by which forward multiplies x [..., in] as it is; None if it changes x before."""
    linear.settle()
    choice = linear.choice or linear.pack().chosen
    return linear._packed if linear._input_order is None and x.dtype is choice.spec.dtype else None


def backend_of(linear: Any) -> Triton:
    backend: Triton = linear.choice.backend
    return backend
