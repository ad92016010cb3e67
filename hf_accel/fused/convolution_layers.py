"""The layers that encoders of sound begin with (a convolution, a norm, an activation) over rows, without copies.

A convolution moves over the rows [T, channels] of a sequence by whole rows, so that its windows are the rows of a
matrix, each of which begins before the last one ends: a product reads them where they are. Results are made [T,
channels] too, and are handed on as their transpose, [channels, T]: the next layer finds rows again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.cpu.integer_linear import IntegerLinear
from ..kernels.cpu.library import native
from ..kernels.cpu.row_kernels import activate, layer_norm
from ..linear.quant_convolution import QuantConvolution
from ..recognition.unchanged import is_unobserved
from ..recognition.window_products import (
    ACTIVATION,
    CONVOLUTION,
    NORM,
    NORMS,
    ConvolutionLayer,
    as_matrix,
    channels_last,
    has_few_inputs,
    is_known_norm,
    is_product,
    row_windows,
)
from ..tensors import is_plain_tensor
from ..undo.journal import Mixin
from ..undo.state import FUSED
from .projections import ProjectionCall, is_bare_linear

Multiply = Callable[[Tensor, Tensor], Tensor]

BLOCK_ROWS = 1024  # whose products stay in a cache until the activation has read them


class ConvolutionState:
    """The form that is known of a layer, and the native call that multiplies if its convolution is quantized.

    activation: the name of the activation, and what it is.
    """

    def __init__(self, known: ConvolutionLayer, layer: nn.Module) -> None:
        self.known, self.activation = known, (ACTIVATION, layer._modules[ACTIVATION])
        self.call = ProjectionCall(0, activation=known.activation if known.norm is None else None)


class NativeConvolutionLayer(Mixin):
    """A mixin for a layer that convolves, normalizes and activates; hooks on its parts bring its own forward back."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """x [B, in, T] -> [B, out, windows]."""
        if len(args) == 1 and not kwargs and native(args[0]):
            result = _computed(self.__dict__, args[0])
            if result is not None:
                return result
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def _computed(own: dict[str, Any], x: Tensor) -> Tensor | None:
    """Return the result of a layer with these attributes; None if it must run its own code."""
    state: ConvolutionState = own[FUSED]
    held: dict[str, Any] = own["_modules"]
    convolution: Any = held.get(CONVOLUTION)
    norm: Any = held.get(NORM)
    if x.ndim != 3 or not x.numel() or not _is_as_tried(held, state) or x.shape[1] != convolution.in_channels:
        return None
    rows = channels_last(convolution, x).contiguous()
    if rows.shape[1] < convolution.kernel_size[0]:
        return None
    inputs = row_windows(rows, convolution)
    products = _products(convolution, norm, inputs, state)
    if products is None:
        return None
    is_activated = norm is None and type(convolution) is QuantConvolution
    out = x.new_empty(*inputs.shape[:2], convolution.out_channels)
    for given, results in zip(inputs, out, strict=True):
        multiply = products(given)
        for block, result in zip(given.split(BLOCK_ROWS), results.split(BLOCK_ROWS), strict=True):
            made = multiply(block, result)
            if type(norm) is nn.LayerNorm:
                made = layer_norm(made, norm.weight, norm.bias, norm.eps)
            if not is_activated:
                activate(made, state.known.activation, out=result)
    return out.mT


def _is_as_tried(held: dict[str, Any], state: ConvolutionState) -> bool:
    """Return whether the parts of a layer compute what was tried, and nobody wants to see one of them called."""
    convolution, (name, tried) = held.get(CONVOLUTION), state.activation
    if held.get(name) is not tried or not all(is_unobserved(part) for part in held.values() if part is not None):
        return False
    if type(convolution) is QuantConvolution:
        same = is_bare_linear(convolution.linear)
    else:
        same = type(convolution) is nn.Conv1d and is_product(convolution)
    return same and type(held.get(NORM)) is NORMS[state.known.norm] and is_known_norm(held)


def _products(
    convolution: Any, norm: Any, inputs: Tensor, state: ConvolutionState
) -> Callable[[Tensor], Multiply] | None:
    """Return what makes, for the windows of a sequence, the function that multiplies some of them into a result.

    inputs: the windows of all. None if the parts have no product that is known to be faster than their own code.
    """
    if type(convolution) is QuantConvolution:
        call = state.call.ready((convolution.linear,), inputs)
        return (lambda _: call) if isinstance(call, IntegerLinear) and _is_of_rows(norm) else None
    parameters = convolution._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or "bias" not in parameters:  # something computes them again for each call
        return None
    shape = convolution.out_channels, convolution.in_channels, *convolution.kernel_size
    if weight.shape != shape or not all(_is_float(each) for each in (weight, bias, inputs) if each is not None):
        return None
    matrix = as_matrix(weight)
    if _is_of_rows(norm):
        return lambda _: partial(_multiply, matrix.t(), bias)
    if not has_few_inputs(convolution) or not all(_is_float(norm._parameters[name]) for name in ("weight", "bias")):
        return None
    return lambda given: partial(_multiply, *_normalized(matrix, norm, given))


def _is_of_rows(norm: Any) -> bool:
    """Return whether a norm, or none, reads single rows."""
    return norm is None or type(norm) is nn.LayerNorm


def _is_float(tensor: Any) -> bool:
    return is_plain_tensor(tensor) and tensor.is_cpu and tensor.dtype is torch.float32


def _multiply(weight: Tensor, bias: Tensor | None, given: Tensor, out: Tensor) -> Tensor:
    """Compute given [n, in] @ weight [in, out] + bias."""
    return torch.mm(given, weight, out=out) if bias is None else torch.addmm(bias, given, weight, out=out)


def _normalized(weight: Tensor, norm: nn.GroupNorm, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight [in, out] and the bias with which the windows of a sequence have the norm of each channel.

    given: [n, in]. The mean and the variance of weight @ window over all windows follow from those of the windows,
    which are few numbers: they are computed in float64, and the results need not be read twice.
    """
    wide, matrix = given.double(), weight.double()
    mean = wide.mean(0)
    away = wide - mean
    spread = away.t() @ away / len(wide)
    variance = ((matrix @ spread) * matrix).sum(1).clamp_min(0)
    factor = norm.weight.double() * (variance + norm.eps).rsqrt()
    return (matrix * factor[:, None]).float().t(), (norm.bias - factor * (matrix @ mean)).float()
