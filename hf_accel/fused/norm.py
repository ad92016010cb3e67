"""RMSNorm in one native call instead of six operators."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from ..instance import Mixin
from ..kernels.cpu.norm import rms_norm
from .products import native

MAGNITUDES = (1e-3, 1.0, 300.0)  # of the inputs tried: at the smallest, eps counts


@dataclass(frozen=True)
class NormForm:
    """x / sqrt(mean(x^2) + eps) * (offset + weight); round_first: rounded to x's dtype before the product."""

    eps: float
    offset: float
    round_first: bool


def norm_form(module: nn.Module) -> NormForm | None:
    """How a module normalizes, found by trying each form on random input; None if it is no RMSNorm."""
    weight = module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if len(list(module.parameters())) != 1 or weight is None or weight.ndim != 1 or not isinstance(eps, float):
        return None
    forms = [NormForm(eps, offset, first) for offset, first in product((0.0, 1.0), (True, False))]
    differences = [_difference(module, weight, form) for form in forms]
    least = min(differences)
    return None if least == math.inf else forms[differences.index(least)]


@torch.no_grad()
def _difference(module: nn.Module, weight: Tensor, form: NormForm) -> float:
    """The share of numbers that differ from the module's own; infinite where one does by more than a rounding.

    torch's own sums differ in the last bit by how memory is aligned, so that equality cannot be asked for.
    """
    generator = torch.Generator().manual_seed(0)
    different = 0.0
    for magnitude in MAGNITUDES:
        x = (torch.randn(4, weight.shape[0], generator=generator) * magnitude).to(weight.dtype)
        got, expected = _run(x, weight, form), type(module).forward(module, x)
        if not isinstance(expected, Tensor) or got.dtype != expected.dtype or got.shape != expected.shape:
            return math.inf
        if not torch.allclose(got, expected, rtol=2 * torch.finfo(got.dtype).eps, atol=0):
            return math.inf
        different += float((got != expected).float().mean())
    return different


def _run(x: Tensor, weight: Tensor, form: NormForm) -> Tensor:
    return rms_norm(x, weight, form.eps, offset=form.offset, round_first=form.round_first)[0]


class NativeNorm(Mixin):
    """Mixed into an RMSNorm."""

    def forward(self, x: Tensor) -> Tensor:
        if native(x):
            return _run(x, self.__dict__["_parameters"]["weight"], self.__dict__["_hf_accel_fused"])
        stock: Tensor = super().forward(x)  # type: ignore[misc]
        return stock
