"""LayerNorm of rows and of sums, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.row_kernels import add_layer_norm, layer_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 5, 8, 31, 64, 127, 384, 1000, 5633]
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
EPS = 1e-5


def true_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = EPS) -> Tensor:
    affine = [factor if factor is None else factor.double() for factor in (weight, bias)]
    return F.layer_norm(x.double(), x.shape[-1:], *affine, eps)


def assert_near(out: Tensor, exact: Tensor) -> None:
    limit = ROUNDING[out.dtype]
    torch.testing.assert_close(out.double(), exact, rtol=limit, atol=limit)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_against_float64(size: int, dtype: torch.dtype) -> None:
    x, y = ((torch.randn(5, size) * 3 + 1).to(dtype) for _ in range(2))
    weight, bias = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    assert_near(layer_norm(x, weight, bias, EPS), true_norm(x, weight, bias))
    assert_near(layer_norm(x, None, None, EPS), true_norm(x, None, None))
    assert_near(layer_norm(x, weight.float(), None, EPS), true_norm(x, weight.float(), None))  # a float32 weight
    assert_near(layer_norm(x, weight, bias, EPS, offset=1.0), true_norm(x, weight + 1.0, bias))
    out, total = add_layer_norm(x, y, weight, bias, eps=EPS)
    assert torch.equal(total, x + y)
    assert_near(out, true_norm(x + y, weight, bias))  # of the sum as it was rounded
    assert torch.equal(layer_norm(x, weight, bias, EPS, y=y), out)


@pytest.mark.usefixtures("isa")
def test_the_sum_is_normalized_as_it_was_rounded() -> None:
    """2^-9 beside 1 is lost in bfloat16, and so a row of both is constant."""
    x, y = torch.ones(1, 64).bfloat16(), torch.zeros(1, 64).bfloat16()
    y[0, ::2] = 2**-9
    assert layer_norm(x, None, None, EPS, y=y).eq(0).all()


@pytest.mark.usefixtures("isa")
def test_a_mean_far_from_zero_costs_no_digits() -> None:
    x = torch.randn(3, 768).double() + 3000
    out = layer_norm(x.float(), None, None, 1e-12)
    torch.testing.assert_close(
        out.double(), true_norm(x.float(), None, None, 1e-12), rtol=0, atol=3e-4
    )  # an ulp of 3000


@pytest.mark.usefixtures("isa")
def test_any_rows_strides_and_threads() -> None:
    wide, other, weight, bias = torch.randn(300, 80), torch.randn(300, 64), torch.randn(64), torch.randn(64)
    x, before = wide[:, 3:67], torch.get_num_threads()
    out = layer_norm(x, weight, bias, EPS, y=other)
    assert torch.equal(layer_norm(x.contiguous(), weight, bias, EPS, y=other), out)
    assert torch.equal(layer_norm(other, weight, bias, EPS, y=x), out)
    assert torch.equal(layer_norm(x[7:8], weight, bias, EPS, y=other[7:8]), out[7:8])
    strided = weight.repeat(2)[::2]
    assert torch.equal(layer_norm(x, strided, bias, EPS), layer_norm(x, strided.clone(), bias, EPS))
    deep = torch.randn(2, 5, 3, 64).transpose(1, 2)
    assert torch.equal(layer_norm(deep, weight, bias, EPS), layer_norm(deep.contiguous(), weight, bias, EPS))
    assert layer_norm(x[:0], weight, bias, EPS).shape == (0, 64)
    try:
        torch.set_num_threads(2)
        assert torch.equal(layer_norm(x, weight, bias, EPS, y=other), out)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    x = torch.randn(5, 40).to(dtype)
    clean = layer_norm(x, None, None, EPS)
    x[1, 3], x[2, 39], x[3] = float("nan"), float("inf"), 0
    out = layer_norm(x, None, None, EPS)
    assert out[1:3].isnan().all() and out[3].eq(0).all() and torch.equal(out[[0, 4]], clean[[0, 4]])


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"weight": torch.ones(7)}, r"a weight of torch.float32 \(7,\) for rows of 8"),
        ({"bias": torch.ones(8).double()}, "a bias of torch.float64"),
        ({"y": torch.ones(1, 8)}, "give it two of one shape"),
        ({"y": torch.ones(2, 8).half()}, "give it two of one shape"),
        ({"weight": torch.ones(8, requires_grad=True)}, "no_grad"),
    ],
    ids=["weight", "bias", "y", "dtype", "gradient"],
)
def test_refuses(operands: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        layer_norm(torch.randn(2, 8), **{"weight": None, "bias": None, "eps": EPS, **operands})
