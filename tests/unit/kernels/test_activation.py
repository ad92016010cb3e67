"""The activations behind a gate's product, against torch: the bits of silu, and gelu within a rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accel.kernels.cpu.float_linear import FloatLinear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GELU = {"gelu": "none", "gelu_tanh": "tanh"}


def activated(activation: str, gate: Tensor) -> Tensor:
    """act(gate) * 1, where both products are 0 and the biases are what is added to them."""
    nothing = torch.zeros(len(gate), 1, dtype=gate.dtype)
    return FloatLinear([nothing, nothing], [gate, torch.ones_like(gate)], activation)(nothing[:1])[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_has_the_bits_of_torch(isa: str, dtype: torch.dtype) -> None:
    if isa == "portable":
        pytest.skip("without fused multiply-add exp rounds otherwise")
    for gate in (torch.randn(4999) * 6, torch.linspace(-120, 120, 10000)):
        assert torch.equal(activated("silu", gate.to(dtype)), F.silu(gate.to(dtype)))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", *GELU])
def test_against_float64(activation: str, dtype: torch.dtype) -> None:
    gate = torch.cat((torch.linspace(-12, 12, 20001), torch.randn(501) * 0.01)).to(dtype)
    exact = F.silu(gate.double()) if activation == "silu" else F.gelu(gate.double(), approximate=GELU[activation])
    out = activated(activation, gate).double()
    rounding = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert ((out - exact).abs() <= exact.abs() * rounding + 3e-7 * gate.double().abs().clamp(min=0.2)).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("activation", ["silu", *GELU])
def test_extremes(activation: str) -> None:
    infinity = float("inf")
    out = activated(activation, torch.tensor([float("nan"), infinity, 0.0, -0.0, 1e30, -1e30, 1e-42, -200.0, 200.0]))
    assert out[0].isnan()
    expected = torch.tensor([infinity, 0.0, 0.0, 1e30, 0.0, 0.0, 0.0, 200.0])
    torch.testing.assert_close(out[1:], expected, atol=1e-41, rtol=0)
