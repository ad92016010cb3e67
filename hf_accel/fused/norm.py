"""RMSNorm in one native call instead of six operators."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..instance import Mixin, original_class
from ..kernels.cpu.library import FLOATS
from ..kernels.cpu.norm import rms_norm
from ..tensors import is_plain as is_plain_tensor
from .products import native

# Of the inputs tried: their sizes (at the smallest, eps counts), their shapes, and whether the module is training.
TRIALS = ((1e-3, (4,), False), (1.0, (2, 2), False), (300.0, (2, 1, 2), False), (1.0, (4,), True))


@dataclass(frozen=True)
class NormForm:
    """x / sqrt(mean(x^2) + eps) * (offset + weight); round_first: rounded to x's dtype before the product."""

    eps: float
    offset: float
    round_first: bool


class NormForms:
    """The form of one norm by dtype: what is the same in float32 need not be in bfloat16. None: it has none."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], NormForm | None] = {}

    def form(self, module: nn.Module, kind: type, x: Tensor) -> NormForm | None:
        """That of a module of the class `kind` for this input, tried when first asked for."""
        weight = module._parameters["weight"]
        if weight is None or x.shape[-1:] != weight.shape or not weight.is_cpu:
            return None
        key = x.dtype, weight.dtype, _eps(module)
        if key not in self._known:
            self._known[key] = norm_form(module, kind, dtype=x.dtype)
        return self._known[key]


def _eps(module: nn.Module) -> object:
    own = module.__dict__
    return own.get("variance_epsilon") or own.get("eps")


def norm_form(module: nn.Module, kind: type | None = None, *, dtype: torch.dtype | None = None) -> NormForm | None:
    """How a module normalizes inputs of `dtype` (its weight's by default), found by trying each form on random input.

    kind: the class whose forward it is. None if it is no RMSNorm, and holds anything besides a weight and an eps.
    """
    weight = module._parameters.get("weight")
    eps = _eps(module)
    if len(list(module.parameters())) != 1 or module._modules or module._buffers:
        return None
    if weight is None or weight.ndim != 1 or not is_plain_tensor(weight) or not isinstance(eps, float):
        return None
    dtype = dtype or weight.dtype
    if weight.dtype not in FLOATS or dtype not in FLOATS or not weight.is_cpu:
        return None
    forms = [NormForm(eps, offset, first) for offset, first in product((0.0, 1.0), (True, False))]
    with torch.random.fork_rng(devices=[]):  # one with dropout in it would take of the user's random numbers
        differences = [_difference(copy.copy(module), kind or type(module), weight, form, dtype) for form in forms]
    least = min(differences)
    return None if least == math.inf else forms[differences.index(least)]


@torch.no_grad()
def _difference(module: Any, kind: Any, weight: Tensor, form: NormForm, dtype: torch.dtype) -> float:
    """The share of numbers that differ from the module's own; infinite where one does by more than a rounding.

    torch's own sums differ in the last bit by how memory is aligned, so that equality cannot be asked for.
    """
    generator = torch.Generator().manual_seed(0)
    different = 0.0
    for magnitude, shape, module.training in TRIALS:
        x = (torch.randn(*shape, weight.shape[0], generator=generator) * magnitude).to(dtype)
        got, expected = _run(x, weight, form), kind.forward(module, x)
        if not isinstance(expected, Tensor) or got.dtype != expected.dtype or got.shape != expected.shape:
            return math.inf
        if not torch.allclose(got, expected, rtol=2 * torch.finfo(got.dtype).eps, atol=0):
            return math.inf
        different += float((got != expected).float().mean())
    return different


def _run(x: Tensor, weight: Tensor, form: NormForm) -> Tensor:
    return rms_norm(x, weight, form.eps, offset=form.offset, round_first=form.round_first)


class NativeNorm(Mixin):
    """Mixed into an RMSNorm."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and native(args[0]):
            own, x = self.__dict__, args[0]
            form = own["_hf_accel_fused"].form(self, original_class(self), x)
            if form is not None:
                return _run(x, own["_parameters"]["weight"], form)
        return super().forward(*args, **kwargs)  # type: ignore[misc]
