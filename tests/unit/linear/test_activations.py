from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_accel.linear.activations import quantize_rows, round_groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_row_is_rounded_to_its_own_scale(dtype):
    x = (torch.randn(6, 50) * 10.0 ** torch.arange(-2, 4)[:, None]).clamp(-6e4, 6e4).to(dtype)
    before = x.clone()
    levels, scale = quantize_rows(x)
    exact = x.float().numpy()
    expected = np.abs(exact).max(axis=1, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal(scale.numpy(), expected)
    np.testing.assert_array_equal(levels.numpy(), np.rint(exact / expected))
    assert levels.abs().amax(dim=1).tolist() == [127] * 6
    assert torch.equal(x, before)


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38])
def test_a_row_of_nothing_gives_nothing(size):
    x = torch.tensor([[size, -size, 0.0]])
    levels, scale = quantize_rows(x)
    assert (levels * scale - x).abs().max() <= torch.finfo(torch.float32).tiny / 2
    assert levels.abs().max() <= 127


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so_and_leaves_the_others(value):
    x = torch.randn(3, 8)
    alone = quantize_rows(x[:1])
    x[1, 2] = value
    levels, scale = quantize_rows(x)
    assert scale.isnan().flatten().tolist() == [False, True, False]
    assert torch.equal(levels[:1], alone[0])


def test_no_rows():
    levels, scale = quantize_rows(torch.empty(0, 8))
    assert levels.shape == (0, 8)
    assert scale.shape == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [1, 31, 32, 100])
def test_an_outlier_spoils_its_group_only(dtype, inputs):
    x = torch.randn(4, inputs).to(dtype)
    x[:, 0] = 1000
    rounded = round_groups(x, 32)
    for start in range(0, inputs, 32):
        part = x[:, start : start + 32].float()
        step = part.abs().amax(dim=1, keepdim=True) / 127
        error = (rounded[:, start : start + 32] - part).abs()
        assert (error <= step * 0.5001).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_says_so(value):
    x = torch.randn(2, 64)
    x[1, 40] = value
    rounded = round_groups(x, 32)
    assert rounded.isnan().tolist() == [[False] * 64, [False] * 32 + [True] * 32]


def test_tiny_groups_and_no_rows():
    assert torch.equal(round_groups(torch.tensor([[1e-36, 0.0]]), 32), torch.zeros(1, 2))
    assert round_groups(torch.empty(0, 8), 32).shape == (0, 8)
