"""Float linears against float64, and a row's bits against every batch, split and thread count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.float_linear import FloatLinear

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
EPSILON = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half a unit in the last place


@pytest.fixture(params=[False, True], ids=["[out, in]", "[in, out]"])
def by_inputs(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def made(
    weights: list[Tensor], biases: list[Tensor | None], epilogue: str | None = None, *, by_inputs: bool
) -> FloatLinear:
    """Of weights [out, in], which are stored as [in, out], if `by_inputs`."""
    stored = [weight.t().contiguous() if by_inputs else weight for weight in weights]
    return FloatLinear(stored, biases, epilogue, by_inputs=by_inputs)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def assert_as_accurate_as_float32(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Float32 sums: an error of a few roundings of the sum of magnitudes, and one rounding to the dtype."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitude = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    bound = 2**-24 * 16 * magnitude + exact.abs() * EPSILON[x.dtype] * 1.01 + 1e-7
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 7), (47, 31), (49, 33), (100, 1025), (130, 2049), (17, 4100), (7, 8200)]
)
def test_any_size(dtype: torch.dtype, shape: tuple[int, int], *, by_inputs: bool) -> None:
    weight, bias = numbers(*shape, dtype=dtype), numbers(shape[0], dtype=dtype)
    for rows in (1, 3, 5, 33, 130):  # the last two read weights by panels
        x = numbers(rows, shape[1], dtype=dtype)
        assert_as_accurate_as_float32(made([weight], [bias], by_inputs=by_inputs)(x), x, weight, bias)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_another_dtype_than_the_weights(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    weight, x = numbers(20, 77, dtype=dtype), numbers(3, 77, dtype=x_dtype)
    out = FloatLinear([weight], [None])(x)
    assert out.dtype == x_dtype
    assert_as_accurate_as_float32(out, x, weight, None)


@pytest.mark.parametrize("inputs", [100, 2100, 8200])  # outputs share a reading of inputs as long as the last ones
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(
    dtype: torch.dtype, inputs: int, *, by_inputs: bool
) -> None:
    weights = [numbers(n, inputs, dtype=dtype) for n in (153, 9, 9)]
    linear = made(weights, [None] * 3, by_inputs=by_inputs)
    x = numbers(130, inputs, dtype=dtype)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(130)])
    for rows in [*range(1, 14), 16, 31, 32, 33, 47, 64, 65, 127, 128, 129, 130]:
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(linear(x[:rows]), alone[:rows]) for rows in (1, 7, 65, 130))
    finally:
        torch.set_num_threads(threads)


def test_more_rows_than_are_packed_at_once(*, by_inputs: bool) -> None:
    weight, x = numbers(5, 40), numbers(1030, 40)
    linear = made([weight], [None], by_inputs=by_inputs)
    out = linear(x)
    assert_as_accurate_as_float32(out, x, weight, None)
    assert torch.equal(out[1000:1001], linear(x[1000:1001]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_side_by_side_are_each_alone(dtype: torch.dtype, *, by_inputs: bool) -> None:
    weights = [numbers(n, 96, dtype=dtype) for n in (64, 16, 17)]
    biases = [numbers(64, dtype=dtype), None, numbers(17)]
    x = numbers(6, 96, dtype=dtype)
    out = made(weights, biases, by_inputs=by_inputs)(x)
    alone = [made([w], [b], by_inputs=by_inputs)(x) for w, b in zip(weights, biases, strict=True)]
    assert torch.equal(out, torch.cat(alone, 1))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up(dtype: torch.dtype, activation: str, *, by_inputs: bool) -> None:
    gate, up, x = numbers(50, 64, dtype=dtype), numbers(50, 64, dtype=dtype), numbers(70, 64, dtype=dtype)
    biases = [numbers(50, dtype=dtype), numbers(50)]
    linear = made([gate, up], biases, activation, by_inputs=by_inputs)
    gates = F.linear(x.double(), gate.double(), biases[0].double())
    ups = F.linear(x.double(), up.double(), biases[1].double())
    expected = ACTIVATIONS[activation](gates) * ups
    torch.testing.assert_close(linear(x).double(), expected, atol=2e-4, rtol=EPSILON[dtype] * 1.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_views_and_strided_rows(dtype: torch.dtype) -> None:
    flat = numbers(1 + 20 * 77, dtype=dtype)
    weight = flat[1:].view(20, 77)
    wide = numbers(4, 100, dtype=dtype)
    x = wide[:, 3:80]
    linear = FloatLinear([weight], [None])
    expected = FloatLinear([weight.clone()], [None])(x.clone())
    assert torch.equal(linear(x), expected)
    assert torch.equal(linear(x.t().contiguous().t()), expected)  # columns contiguous: copied


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, value: float, *, by_inputs: bool) -> None:
    weight, x = numbers(20, 130, dtype=dtype).abs() + 1, numbers(70, 130, dtype=dtype)
    linear = made([weight], [None], by_inputs=by_inputs)
    clean = linear(x)
    x[3, 129] = value
    out = linear(x)
    expected = torch.full_like(out[3], value)
    assert torch.equal(out[3].nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))
    x[3] = 0
    assert torch.equal(linear(x)[3], torch.zeros_like(out[3]))
    others = torch.arange(70) != 3
    assert torch.equal(out[others], clean[others])


def test_very_large_very_small_and_empty() -> None:
    weight = torch.tensor([[1e30, 1e-30]])
    linear = FloatLinear([weight], [None])
    assert linear(torch.tensor([[1e8, 1e-8]])).item() == pytest.approx(1e38)
    assert linear(torch.tensor([[1e10, 1.0]])).item() == float("inf")
    assert linear(torch.empty(0, 2)).shape == (0, 1)
    assert linear(torch.tensor([[0.0, 1e-8]])).item() == pytest.approx(1e-38)


def test_weights_are_read_where_they_are_now() -> None:
    module = torch.nn.Linear(8, 4).requires_grad_(False)
    linear = FloatLinear([module.weight], [module.bias])
    x = torch.randn(2, 8)
    module.weight.mul_(2)
    torch.testing.assert_close(linear(x), module(x))
    module.weight.data, module.bias.data = torch.randn(4, 8), torch.randn(4)
    torch.testing.assert_close(linear(x), module(x))
    module.to(torch.bfloat16)
    out = linear(x.to(torch.bfloat16))
    torch.testing.assert_close(out, module(x.to(torch.bfloat16)), atol=0.05, rtol=0.02)
    module.weight.data = torch.randn(4, 9)
    with pytest.raises(UnsupportedError, match="shape"):
        linear(x)


def test_refuses_gradients_and_strange_weights() -> None:
    weight, x = torch.randn(4, 8), torch.randn(2, 8)
    with pytest.raises(UnsupportedError, match="no_grad"):
        FloatLinear([weight], [None])(x.requires_grad_())
    with pytest.raises(UnsupportedError, match="no_grad"):
        FloatLinear([torch.nn.Parameter(weight)], [None])(x.detach())
    with torch.no_grad():
        FloatLinear([torch.nn.Parameter(weight)], [None])(x)
    for weights, biases, epilogue in [
        ([weight.t()], [None], None),
        ([weight.double()], [None], None),
        ([weight, weight.half()], [None, None], None),
        ([weight], [None], "silu"),
        ([weight], [None], "relu"),
        ([weight, weight[:3]], [None, None], "silu"),
        ([weight], [torch.randn(3)], None),
        ([weight], [torch.randn(4).double()], None),
        ([], [], None),
    ]:
        with pytest.raises(UnsupportedError):
            FloatLinear(weights, biases, epilogue)
    FloatLinear([weight], [torch.randn(8)], by_inputs=True)
    with pytest.raises(UnsupportedError, match="for 8 outputs"):
        FloatLinear([weight], [torch.randn(4)], by_inputs=True)
    with pytest.raises(UnsupportedError, match="shape"):
        FloatLinear([weight, weight[:3]], [None, None], by_inputs=True)
