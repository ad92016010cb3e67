"""Quantized layers from float weights, as patch() makes them."""

from __future__ import annotations

from torch import Tensor

from hf_accel.config import WeightConfig
from hf_accel.linear import LinearSpec, QuantLinear, choose


def quantized_layer(
    weight: Tensor, bias: Tensor | None = None, *, config: WeightConfig, backend: str = "auto"
) -> QuantLinear:
    """A layer over a floating-point weight [out, in], quantized and packed."""
    choice = choose(LinearSpec.of(weight, config), backend)
    packed = choice.backend.quantize(weight.detach(), config)
    return QuantLinear.from_packed(packed, bias, choice=choice, backend=backend)
