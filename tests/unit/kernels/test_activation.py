"""Activations of rows, behind a product and behind a gate's product, against torch and float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.float_linear import FloatLinear
from hf_accel.kernels.cpu.integer_linear import IntegerLinear, quantize
from hf_accel.kernels.cpu.library import ACTIVATIONS
from hf_accel.kernels.cpu.row_kernels import activate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GELU = {"gelu": "none", "gelu_tanh": "tanh"}
INFINITY, NAN = float("inf"), float("nan")
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),  # QuickGELUActivation of transformers
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "relu_squared": lambda x: F.relu(x).square(),  # ReLUSquaredActivation of transformers
}
FROM_TORCH = {
    "silu": 0.0,
    "gelu": 1.5e-6,
    "gelu_tanh": 5e-7,
    "gelu_quick": 0.0,
    "relu": 0.0,
    "sigmoid": 0.0,
    "relu_squared": 0.0,
}  # at most, in float32


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


# -- of each number of rows ---------------------------------------------------------------------------------


def every_exponent() -> Tensor:
    """Floats of both signs: 24 with each exponent, denormal ones too."""
    mantissas = torch.cat((torch.tensor([0, 1, 2**23 - 1]), torch.randint(0, 2**23, (21,))))
    bits = (torch.arange(255)[:, None] * 2**23 + mantissas).flatten().int().view(torch.float32)
    return torch.cat((bits, -bits))


def true_gelu(x: Tensor) -> Tensor:
    x = x.double()
    tail = x.abs() / 2 * torch.special.erfc(x.abs() / math.sqrt(2))
    return torch.where(x < 0, -tail, x - tail)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("x", [every_exponent(), torch.linspace(-15, 15, 300001)], ids=["exponents", "usual"])
def test_gelu_is_close_to_the_true_value(x: Tensor) -> None:
    """The digits of a negative number are kept, which torch's own loses."""
    exact, out = true_gelu(x), activate(x, "gelu").double()
    usual = x > -3.5
    assert ((out - exact).abs() <= 2e-6 * exact.abs() + 2.0**-149)[usual].all()
    assert ((out - exact).abs() <= 5e-5 * exact.abs() + 1e-12)[~usual].all()
    assert ((out - exact).abs() <= 3e-7 * exact)[x > 2.0**-126].all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_difference_from_torch_is_as_documented(isa: str, activation: str) -> None:
    x = torch.cat((every_exponent(), torch.linspace(-30, 30, 100000), torch.randn(5003)))
    x = x[x.abs() < 1e3]  # beyond, torch's results are 0 or x
    limit = 2e-5 if isa == "portable" and activation in ("silu", "gelu_quick") else FROM_TORCH[activation]
    expected = TORCH[activation](x)
    last_bits = expected.abs() * 2.0**-22  # torch itself computes the ends of its threads' rows by another loop
    assert ((activate(x, activation) - expected).abs() <= last_bits.clamp(min=limit)).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_rounded_once(activation: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype)  # all there are
    expected = activate(x.float(), activation).to(dtype)
    torch.testing.assert_close(activate(x, activation), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_finite_and_zeros(activation: str) -> None:
    x = torch.tensor([NAN, INFINITY, -INFINITY, 0.0, -0.0, 3e38, -3e38])
    out = activate(x, activation)
    if activation == "sigmoid":
        expected = [1.0, 0.0, 0.5, 0.5, 1.0, 0.0]
        assert out[0].isnan() and out[1:].tolist() == expected
        return
    if activation == "relu_squared":
        assert out[0].isnan() and out[1:].tolist() == [INFINITY, 0.0, 0.0, 0.0, INFINITY, 0.0]
        return
    assert out[0].isnan() and out[1] == INFINITY and out[5] == x[5]
    assert out[2] == 0 if activation in ("relu", "gelu") else out[2].isnan()
    assert out[[3, 4, 6]].eq(0).all() and out[3:5].signbit().tolist() == [False, True]


@pytest.mark.usefixtures("isa")
def test_rows_with_a_stride_any_number_and_threads() -> None:
    wide = torch.randn(70, 1000)
    x, before = wide[:, 3:640], torch.get_num_threads()
    expected = activate(x.contiguous(), "gelu")
    assert torch.equal(activate(x, "gelu"), expected) and torch.equal(activate(x[5:6], "gelu")[0], expected[5])
    assert torch.equal(activate(x[:, 7:], "gelu"), expected[:, 7:])  # whatever stands beside a number
    assert activate(x[:0], "gelu").shape == (0, 637) and activate(x[:, :0], "gelu").shape == (70, 0)
    try:
        torch.set_num_threads(2)
        assert torch.equal(activate(x, "gelu"), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_halves_of_one_product_are_multiplied(activation: str, dtype: torch.dtype) -> None:
    """The activation is rounded before it is multiplied, as a model does it."""
    both = (torch.randn(37, 2 * 93) * 3).to(dtype)
    x, y = both.chunk(2, dim=1)
    assert torch.equal(activate(x, activation, y=y), activate(x, activation) * y)
    assert torch.equal(activate(x, activation, y=y.contiguous()), activate(x, activation, y=y))  # another stride
    with pytest.raises(UnsupportedError, match="one shape"):
        activate(x, activation, y=y[:, 1:])
    with pytest.raises(UnsupportedError, match="one dtype"):
        activate(x, activation, y=y.double())


def test_refuses_other_names_and_gradients() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(UnsupportedError, match="'mish' is not known; choose one of"):
        activate(x, "mish")
    with pytest.raises(UnsupportedError, match="no_grad"):
        activate(x.requires_grad_(), "gelu")


# -- behind a product ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bits", [8, 4])
def test_behind_integer_products(bits: int, activation: str) -> None:
    found = [quantize(bits, torch.randn(outputs, 128), 32) for outputs in (70, 130)]
    weights, biases = [result[0] for result in found if result is not None], [torch.randn(70), None]
    plain, fused = (IntegerLinear(weights, biases, activation=name) for name in (None, activation))
    for rows in (1, 3, 7, 17, 50):
        x = torch.randn(rows, 128)
        assert torch.equal(fused(x), activate(plain(x), activation))
        short = x.bfloat16()
        assert torch.equal(fused(short), activate(plain(short.float()), activation).bfloat16())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_behind_float_products(activation: str) -> None:
    weights, biases = [torch.randn(70, 100), torch.randn(33, 100)], [torch.randn(70), None]
    plain, fused = (FloatLinear(weights, biases, activation=name) for name in (None, activation))
    for rows in (1, 2, 7, 40, 130):
        x = torch.randn(rows, 100)
        assert torch.equal(fused(x), activate(plain(x), activation))


@pytest.mark.parametrize("names", [{"activation": "mish"}, {"epilogue": "silu", "activation": "gelu"}], ids=str)
def test_linears_refuse_other_activations(names: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match="activation"):
        FloatLinear([torch.randn(4, 8)] * 2, [None] * 2, **names)
