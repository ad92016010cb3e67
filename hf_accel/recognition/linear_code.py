"""Linear layers with a class of their own that compute what nn.Linear does, as Falcon's, or x @ W + b, as GPT-2's."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trial import INITIALIZED, RandomNumbers, Tolerance, agree
from .unchanged import is_known_class

IN, OUT = 24, 40


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is an nn.Linear, or one that a trial of its class's code shows to compute the same."""
    kind = type(module)
    if kind is nn.Linear:
        return True
    if not isinstance(module, nn.Linear) or {*module._parameters} != {"weight", "bias"} or module._buffers:
        return False
    # A setting of its own would say that it may compute something else.
    settings = vars(module).keys() - vars(_example(bias=False)).keys()
    return settings <= {INITIALIZED} and is_known_class(kind) and _multiplies(kind.forward)


@lru_cache(maxsize=256)
def _multiplies(forward: Callable[..., Tensor]) -> bool:
    x, near = RandomNumbers()(3, 2, IN), Tolerance(of_largest=1e-5)
    for layer in (_example(bias=True), _example(bias=False)):
        if not agree(lambda: forward(layer, x), lambda: F.linear(x, layer.weight, layer.bias), near):  # noqa: B023
            return False
    return True


def _example(*, bias: bool) -> nn.Linear:
    numbers, layer = RandomNumbers(), nn.Linear(IN, OUT, bias=bias, device="meta")  # takes no random numbers
    layer.weight = nn.Parameter(numbers(OUT, IN), requires_grad=False)
    if bias:
        layer.bias = nn.Parameter(numbers(OUT), requires_grad=False)
    return layer


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module has the name and the sizes of transformers' Conv1D, whose weight is [in, out]."""
    own: dict[str, Any] = vars(module)
    weight = own["_parameters"].get("weight")
    return type(module).__name__ == "Conv1D" and weight is not None and weight.shape == (own.get("nx"), own.get("nf"))


def is_plain_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, as a trial of its class's code shows."""
    kind, held = type(module), {*module._parameters} == {"weight", "bias"} and not module._buffers
    return is_conv1d(module) and held and is_known_class(kind) and _multiplies_by_inputs(kind.forward)


@lru_cache(maxsize=256)
def _multiplies_by_inputs(forward: Callable[..., Tensor]) -> bool:
    numbers = RandomNumbers()
    weight, bias, x = numbers(IN, OUT), numbers(OUT), numbers(3, 2, IN)
    layer = SimpleNamespace(nx=IN, nf=OUT, weight=weight, bias=bias)
    return agree(lambda: forward(layer, x), lambda: x @ weight + bias, Tolerance(of_largest=1e-5))


def rounds_its_bias_apart(module: nn.Module) -> bool:
    """Return whether code of its own may round a product before it adds the bias."""
    own = type(module) is not nn.Linear
    return own and module._parameters.get("bias") is not None and module.weight.dtype is not torch.float32
