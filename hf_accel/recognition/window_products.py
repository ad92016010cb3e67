"""Convolutions that are products of windows of rows, and recognition of the layers that encoders of sound begin with:
a convolution, a norm and an activation, whose code is tried against the formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..undo.journal import original_class
from .known_module import tried
from .known_modules import known_module
from .trial import PLAIN_ACTIVATIONS, RandomNumbers, Tolerance, activation_name, agree, unwatched_twin

CONVOLUTION, NORM, ACTIVATION = "conv", "layer_norm", "activation"
NORMS = {None: type(None), "layer": nn.LayerNorm, "group": nn.GroupNorm}
FEWEST_INPUTS = 64  # of a product that is worth rounding; a first layer is given the wave itself
# The least work of a product that is worth rounding, as a share of the largest one's in a stack. With random weights,
# rounding the two largest of WavLM base, three quarters of the work, leaves the least cosine of 12 INT8 layers at
# 0.99945, and rounding three at 0.9994; the time is the same within what two runs differ by.
LEAST_SHARE = 1 / 2


def is_product(module: Any) -> bool:
    """Return whether a module is a convolution over rows each of whose outputs is the product of one window."""
    if not isinstance(module, nn.Conv1d) or module.padding_mode != "zeros":
        return False
    return (module.dilation, module.groups) == ((1,), 1) and (
        isinstance(module.padding, tuple) or module.kernel_size == (1,)
    )


def as_matrix(weight: Tensor) -> Tensor:
    """Return the weight [out, in, size] of a convolution as that of a linear layer, [out, size * in]."""
    return weight.mT.flatten(1)


def channels_last(convolution: Any, x: Tensor) -> Tensor:
    """Return x [..., in, T] as rows [..., T, in], with those of zeros that a convolution adds at both ends."""
    padding = convolution.padding
    rows = padding[0] if isinstance(padding, tuple) else 0
    return F.pad(x.mT, (0, 0, rows, rows)) if rows else x.mT


def row_windows(rows: Tensor, convolution: Any) -> Tensor:
    """Return the windows [..., n, size * in] of a convolution over rows [..., T, in], which need not be a copy."""
    (size,), (step,) = convolution.kernel_size, convolution.stride
    return rows.unfold(-2, size, step).mT.flatten(-2)


def product_convolutions(model: nn.Module) -> dict[nn.Module, str | None]:
    """Return the convolutions of known modules that are products, each with the reason to leave its weight as it is,
    as a clause, or None.
    """
    found: dict[nn.Module, str | None] = {}
    for around in model.modules():
        known = known_module(around)
        if known is not None:
            found |= {around._modules[name]: None for name in known[0].products}  # type: ignore[misc]
        elif isinstance(around, nn.ModuleList) and all(convolution_layer(layer) is not None for layer in around):
            convolutions: list[Any] = [layer._modules[CONVOLUTION] for layer in around]
            found |= zip(convolutions, _reasons(convolutions), strict=True)
    return {each: reason for each, reason in found.items() if is_product(each)}


def _reasons(convolutions: list[Any]) -> Iterator[str | None]:
    """Yield the reason to leave the weight of each convolution of a stack as it is."""
    work, rows = [], 1.0
    for each in convolutions:
        rows /= each.stride[0]
        work.append(0 if has_few_inputs(each) else rows * inputs_of(each) * each.out_channels)
    for each, one in zip(convolutions, work, strict=True):
        if has_few_inputs(each):
            yield f"has {inputs_of(each)} inputs alone"
        else:
            yield "takes little time next to the layers ahead" if one < LEAST_SHARE * max(work) else None


def inputs_of(convolution: Any) -> int:
    """Return the number of inputs of a product."""
    return int(convolution.in_channels * convolution.kernel_size[0])


def has_few_inputs(convolution: Any) -> bool:
    """Return whether a convolution has so few inputs that its weight stays as it is."""
    return inputs_of(convolution) < FEWEST_INPUTS


class ConvolutionLayer(NamedTuple):
    """The norm behind a convolution, a key of NORMS, and the name of the activation behind both."""

    norm: str | None
    activation: str


def convolution_layer(module: nn.Module) -> ConvolutionLayer | None:
    """Return the parts of a module that convolves, normalizes and activates, and does nothing else; None for any
    other.
    """
    own = vars(module)
    held = own["_modules"]
    if not {CONVOLUTION, ACTIVATION} <= held.keys() <= {CONVOLUTION, NORM, ACTIVATION}:
        return None
    if own["_parameters"] or own["_buffers"]:
        return None
    norm = next((name for name, kind in NORMS.items() if type(held.get(NORM)) is kind), "")
    activation = activation_name(held[ACTIVATION], PLAIN_ACTIVATIONS)
    if norm == "" or activation is None or not is_known_norm(held):
        return None
    kind, known = original_class(module), ConvolutionLayer(norm, activation)
    return known if tried((kind, kind.forward, known), lambda: _agrees(module, known)) else None


def is_known_norm(held: dict[str, Any]) -> bool:
    """Return whether a norm is one of each channel over time, or of the channels of each row, with its own weights."""
    outputs, norm = vars(held[CONVOLUTION]).get("out_channels"), held.get(NORM)
    if norm is None:
        return outputs is not None
    sizes = (norm.num_groups, norm.num_channels) if type(norm) is nn.GroupNorm else (*norm.normalized_shape, outputs)
    return sizes == (outputs, outputs) and None not in (norm._parameters["weight"], norm._parameters["bias"])


def _agrees(module: nn.Module, known: ConvolutionLayer) -> bool:
    """Return whether the code computes the formula for two sequences, with small weights."""
    kind, numbers, outputs = original_class(module), RandomNumbers(), 8
    with torch.random.fork_rng(devices=[]):  # the user's random numbers stay
        parts: dict[str, Any] = {CONVOLUTION: nn.Conv1d(3, outputs, 5, 2)}
        if known.norm is not None:
            parts[NORM] = nn.LayerNorm(outputs) if known.norm == "layer" else nn.GroupNorm(outputs, outputs)
    with torch.no_grad():
        for tensor in (parameter for part in parts.values() for parameter in part.parameters()):
            tensor.copy_(numbers(*tensor.shape) * 0.5 + (0.5 if tensor.ndim == 1 else 0))
    twin, x = unwatched_twin(module, _modules=parts), numbers(2, 3, 23)

    def ours() -> Tensor:
        convolution: Any = parts[CONVOLUTION]
        norm: Any = parts.get(NORM)
        matrix, bias = as_matrix(convolution.weight), convolution.bias
        y = F.linear(row_windows(channels_last(convolution, x), convolution), matrix, bias)
        if known.norm == "layer":
            y = norm(y)
        elif known.norm == "group":
            mean, variance = y.mean(1, keepdim=True), y.var(1, keepdim=True, unbiased=False)
            y = (y - mean) * (variance + norm.eps).rsqrt() * norm.weight + norm.bias
        result: Tensor = PLAIN_ACTIVATIONS[known.activation](y).mT
        return result

    return agree(lambda: kind.forward(twin, x), ours, Tolerance(of_largest=1e-5))
