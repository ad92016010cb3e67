from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_accel.linear import QuantizedWeight
from hf_accel.linear.input_statistics import Statistics

Loss = Callable[[Tensor, QuantizedWeight, Statistics], float]


@pytest.fixture
def loss() -> Loss:
    """tr(D H D^T), D the change of the weight, in float64."""

    def measure(weight: Tensor, quantized: QuantizedWeight, statistics: Statistics) -> float:
        change = quantized.dequantize(torch.float64) - weight.double()
        return float((change @ statistics.hessian.double() * change).sum())

    return measure


@pytest.fixture
def correlated() -> Callable[[int, int], Tensor]:
    """Inputs [rows, in] of which a few are large and all depend on each other, as those of a real layer."""

    def make(rows: int, width: int) -> Tensor:
        mix = torch.randn(width, width) / width**0.5 + 0.5 * torch.eye(width)
        return torch.randn(rows, width) @ mix * torch.exp(torch.randn(width))

    return make
