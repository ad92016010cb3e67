"""act(gate) * up against torch: the bits of silu, and gelu within a rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.activation import gated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GELU = {"gelu": "none", "gelu_tanh": "tanh"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_has_the_bits_of_torch(isa: str, dtype: torch.dtype) -> None:
    if isa == "portable":
        pytest.skip("without fused multiply-add exp rounds otherwise")
    gate, up = (torch.randn(3, 4999) * 6).to(dtype), torch.randn(3, 4999).to(dtype)
    assert torch.equal(gated("silu", gate, up), F.silu(gate) * up)
    gate = torch.linspace(-120, 120, 10000).to(dtype)
    assert torch.equal(gated("silu", gate, torch.ones_like(gate)), F.silu(gate))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", *GELU])
def test_against_float64(activation: str, dtype: torch.dtype) -> None:
    gate = torch.cat((torch.linspace(-12, 12, 20001), torch.randn(501) * 0.01)).to(dtype)
    exact = F.silu(gate.double()) if activation == "silu" else F.gelu(gate.double(), approximate=GELU[activation])
    out = gated(activation, gate, torch.ones_like(gate)).double()
    rounding = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert ((out - exact).abs() <= exact.abs() * rounding + 3e-7 * gate.double().abs().clamp(min=0.2)).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("activation", ["silu", *GELU])
def test_one_buffer_strides_and_threads(activation: str) -> None:
    wide = torch.randn(5, 9100).bfloat16()
    both = wide[:, 3:9003]
    gate, up = both[:, :4500], both[:, 4500:]
    expected = gated(activation, gate.contiguous(), up.contiguous())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(gated(activation, both), expected)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(gated(activation, gate, up), expected)
    assert torch.equal(gated(activation, gate[2:3], up[2:3]), expected[2:3])
    assert gated(activation, gate[:0], up[:0]).shape == (0, 4500)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("activation", ["silu", *GELU])
def test_extremes(activation: str) -> None:
    infinity = float("inf")
    gate = torch.tensor([float("nan"), infinity, 0.0, -0.0, 1e30, -1e30, 1e-42, -200.0, 200.0])
    out = gated(activation, gate, torch.ones(9))
    assert out[0].isnan()
    expected = torch.tensor([infinity, 0.0, 0.0, 1e30, 0.0, 0.0, 0.0, 200.0])
    torch.testing.assert_close(out[1:], expected, atol=1e-41, rtol=0)


def test_refuses_gradients() -> None:
    with pytest.raises(UnsupportedError, match="no_grad"):
        gated("silu", torch.randn(2, 8, requires_grad=True))
