from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_accel.linear import Int8Weight
from hf_accel.linear.backends import onednn as module
from hf_accel.linear.backends.onednn import OneDNN, is_exact

from ..specs import linear_spec

SPEC = {"in_features": 37, "out_features": 33, "bits": 8, "dtype": torch.float32}

pytestmark = pytest.mark.skipif(not is_exact(), reason="torch's oneDNN INT8 matmul is not available in this build")


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({}, None),
        ({"activations": "int8", "dtype": torch.bfloat16}, None),
        ({"dtype": torch.float16}, None),
        ({"device_type": "cuda"}, "it runs on cpu, not on cuda"),
        ({"activations": None}, "it rounds activations to INT8"),
        ({"dtype": torch.float64}, "it takes float32, bfloat16 and float16, not torch.float64"),
    ],
)
def test_refuses(keywords, reason):
    assert OneDNN().refuses(linear_spec(**(SPEC | keywords))) == reason


def missing(*arguments):
    raise AttributeError("no such op")


def saturating(x, packed):
    """As an instruction that adds pairs in 16 bits would."""
    return matmul(x, packed).clamp(-32768, 32767)


matmul = module._matmul


@pytest.mark.parametrize("broken", [missing, saturating])
def test_refuses_a_build_without_exact_sums(monkeypatch, broken):
    is_exact.cache_clear()
    monkeypatch.setattr(module, "_matmul", broken)
    try:
        reason = OneDNN().refuses(linear_spec(**SPEC))
    finally:
        is_exact.cache_clear()
    assert reason == "torch's oneDNN INT8 matmul is not available in this build"


@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(1, 1, 1), (33, 37, 3), (64, 4096, 2), (257, 383, 65)])
def test_sums_are_exact_integers(outputs, inputs, rows):
    integers = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    integers[0] = 127
    levels = torch.randint(-127, 128, (rows, inputs))
    levels[:, 0] = 127  # so that the row scale is 1, and rounding changes nothing
    packed = OneDNN().pack(Int8Weight(integers, torch.ones(outputs, 1)))
    expected = levels.numpy().astype(np.int64) @ integers.numpy().astype(np.int64).T
    got = OneDNN().run(levels.float(), packed, None)
    np.testing.assert_array_equal(got.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 37), (257, 384)])
def test_a_row_does_not_depend_on_the_batch(make_weight, threads, dtype, outputs, inputs):
    assert OneDNN.row_invariant
    weight, _ = make_weight(8, outputs, inputs, dtype=dtype)
    packed = OneDNN().pack(weight)
    x, bias = torch.randn(64, inputs).to(dtype), torch.randn(outputs).to(dtype)
    alone = torch.cat([OneDNN().run(x[row : row + 1], packed, bias) for row in range(64)])
    torch.set_num_threads(threads)
    for rows in range(1, 65):
        assert torch.equal(OneDNN().run(x[:rows], packed, bias), alone[:rows]), rows


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_alone(make_weight, value):
    weight, _ = make_weight(8, 33, 37)
    packed = OneDNN().pack(weight)
    x = torch.randn(3, 37)
    expected = OneDNN().run(x, packed, None)
    x[1, 5] = value
    got = OneDNN().run(x, packed, None)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], expected[[0, 2]])


def test_a_row_of_zeros_gives_the_bias(make_weight):
    weight, _ = make_weight(8, 33, 37)
    bias = torch.randn(33)
    got = OneDNN().run(torch.zeros(2, 37), OneDNN().pack(weight), bias)
    assert torch.equal(got, bias.expand(2, -1))
