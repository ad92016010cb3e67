from __future__ import annotations

import math

import pytest
import torch

from hf_accel.errors import UnsupportedError
from hf_accel.linear import input_statistics as statistics
from hf_accel.linear.input_statistics import Statistics


@pytest.mark.parametrize("shape", [(1, 3), (7, 3), (5, 4, 3), (2, 3, 4, 3), (9000, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = torch.randn(shape).to(dtype)
    rows = inputs.double().view(-1, 3)
    found = Statistics.of(inputs)
    torch.testing.assert_close(found.hessian.double(), 2 / len(rows) * rows.t() @ rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.magnitudes.double(), rows.abs().mean(0), rtol=1e-5, atol=1e-6)
    assert found.rows == len(rows)


def test_the_factor_is_that_of_the_inverse() -> None:
    found = Statistics.of(torch.randn(500, 60) @ torch.randn(60, 60))
    for by_size in (True, False):
        order, factor = found.factor(by_size=by_size)
        assert sorted(order.tolist()) == list(range(60))
        diagonal = found.hessian.diagonal()
        damped = found.hessian.double() + statistics.DAMPING * diagonal.mean() * torch.eye(60)
        expected = torch.linalg.inv(damped[order][:, order])
        torch.testing.assert_close(factor.double().t() @ factor.double(), expected, rtol=1e-3, atol=1e-6)
        assert torch.equal(factor, factor.triu())
        assert not by_size or (diagonal[order].diff() <= 0).all()


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_any_data_has_a_factor(rows: int) -> None:
    inputs = torch.randn(rows, 64)
    inputs[:, ::3] = 0
    assert Statistics.of(inputs).factor(by_size=True)[1].isfinite().all()
    assert Statistics.of(0 * inputs).factor(by_size=True)[1].isfinite().all()


def test_blocks_are_those_on_the_diagonal() -> None:
    inputs = torch.randn(300, 96)
    inputs[:, 5] = 0
    found = Statistics.of(inputs)
    blocks = found.blocks(32)
    diagonal = found.importance(32)
    assert blocks.shape == (3, 32, 32)
    assert torch.equal(blocks.diagonal(dim1=1, dim2=2), diagonal.squeeze(-1))
    assert torch.equal(blocks[1], found.hessian[32:64, 32:64])
    assert diagonal[0, 5] == found.hessian.diagonal().mean()
    assert found.hessian[5, 5] == 0  # it is left as it was


def test_of_divided_inputs() -> None:
    inputs, scales = torch.randn(300, 32), torch.rand(32) + 0.5
    found, expected = Statistics.of(inputs).divided(scales), Statistics.of(inputs / scales)
    for name in ("hessian", "magnitudes"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert found.scales is scales and expected.scales is None


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    inputs = torch.randn(5000, 4)
    inputs[4500, 2] = value
    with pytest.raises(UnsupportedError, match=r"leads to NaN or infinity here; .* load the model in float32"):
        Statistics.of(inputs)


def test_no_inputs_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="has no tokens"):
        Statistics.of(torch.zeros(0, 4))
