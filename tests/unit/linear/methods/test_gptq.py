"""GPTQ against one that goes column by column over the whole weight, in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.config import WeightConfig
from hf_accel.errors import UnsupportedError
from hf_accel.linear.input_statistics import DAMPING, Statistics
from hf_accel.linear.methods import gptq, quantize, rtn

CONFIGS = [
    WeightConfig(bits=bits, group_size=group, symmetric=symmetric, method="gptq", calibration=["x"])
    for bits, group, symmetric in [
        (4, 32, True),
        (4, 32, False),
        (4, 128, True),
        (8, None, True),
        (8, 128, True),
        (3, 32, False),
        (2, 32, True),
    ]
]


def column_by_column(
    weight: Tensor, statistics: Statistics, scales: Tensor, zeros: Tensor | None, *, bits: int
) -> Tensor:
    """Integers [out, in], by the inverse Hessian of all inputs still to come, computed anew for each (OBQ's form).

    scales, zeros: of each input, [out, in].
    """
    hessian, rows = statistics.hessian.double(), weight.double().clone()
    damping = DAMPING * hessian.diagonal().mean()
    hessian = hessian + torch.diag(damping + (hessian.diagonal() == 0) * hessian.diagonal().mean())
    integers = torch.zeros_like(rows)
    left = statistics.hessian.diagonal().argsort(descending=True, stable=True).tolist()
    while left:
        i = left[0]
        inverse = torch.linalg.inv(hessian[left][:, left])
        zero = torch.zeros_like(rows[:, i]) if zeros is None else zeros[:, i].double()
        scale = scales[:, i].double()
        lowest, highest = -(1 << bits - 1), (1 << bits - 1) - 1
        integers[:, i] = ((rows[:, i] / scale).round() + zero).clamp(lowest, highest)
        error = (rows[:, i] - (integers[:, i] - zero) * scale) / inverse[0, 0]
        rows[:, left] -= error.unsqueeze(1) * inverse[0]
        left = left[1:]
    return integers


@pytest.mark.covering(1)
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(5, 128, 700), (1, 256, 300), (7, 160, 60), (33, 96, 2)])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (3, True), (2, False)])
def test_against_column_by_column(
    outputs: int, inputs: int, rows: int, bits: int, symmetric: bool, correlated: Any
) -> None:
    config = WeightConfig(bits=bits, group_size=32, symmetric=symmetric, method="gptq")
    weight, statistics = torch.randn(outputs, inputs), Statistics.of(correlated(rows, inputs))
    found = gptq.quantize(weight, statistics, config)
    scales = found.weight_scale.repeat_interleave(32, dim=1)
    zeros = found.zero_points()
    expected = column_by_column(
        weight, statistics, scales, None if zeros is None else zeros.repeat_interleave(32, dim=1), bits=bits
    )
    # A value half-way between two levels may fall to either side in float32, and moves all that follow.
    same = (found.integers() == expected).double().mean()
    assert same > 0.97
    assert (found.integers() - expected).abs().max() <= 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.label} {config.group_size}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loses_less_than_rounding_to_nearest(
    config: WeightConfig, dtype: torch.dtype, correlated: Any, loss: Any
) -> None:
    for seed, (outputs, rows) in enumerate(itertools.product([1, 8, 50], [1, 40, 1000])):
        torch.manual_seed(seed)
        weight, statistics = torch.randn(outputs, 256).to(dtype), Statistics.of(correlated(rows, 256))
        ours, nearest = gptq.quantize(weight, statistics, config), rtn.quantize(weight, config)
        assert ours.weight_scale.dtype == dtype and ours.shape == nearest.shape
        assert loss(weight, ours, statistics) <= loss(weight, nearest, statistics)


def test_loses_far_less_on_correlated_inputs(correlated: Any, loss: Any) -> None:
    weight, statistics = torch.randn(64, 256), Statistics.of(correlated(2000, 256))
    ours, nearest = (m.quantize(weight, *s, CONFIGS[2]) for m, s in ((gptq, [statistics]), (rtn, [])))
    assert loss(weight, ours, statistics) < 0.4 * loss(weight, nearest, statistics)


def test_independent_inputs_leave_nothing_to_make_up_for(loss: Any) -> None:
    """The integers are those nearest to the weight then, by the scales that were found."""
    weight, statistics = torch.randn(9, 64), Statistics.of(math.sqrt(64) * torch.eye(64))
    found = gptq.quantize(weight, statistics, CONFIGS[0])
    scales = found.weight_scale.repeat_interleave(32, dim=1)
    assert torch.equal(found.integers().float(), (weight / scales).round().clamp(-8, 7))


def test_inputs_that_are_always_zero_are_rounded_to_nearest(correlated: Any) -> None:
    inputs = correlated(500, 128)
    inputs[:, 3] = inputs[:, 64:96] = 0
    weight, statistics = torch.randn(6, 128), Statistics.of(inputs)
    found = gptq.quantize(weight, statistics, CONFIGS[0])
    change = (found.dequantize(torch.float32) - weight)[:, [3, *range(64, 96)]]
    scales = found.weight_scale.repeat_interleave(32, dim=1)[:, [3, *range(64, 96)]]
    clipped = found.integers()[:, [3, *range(64, 96)]].abs() >= 7
    assert (change.abs() <= 0.5001 * scales.abs())[~clipped].all()
    assert change.norm() < 0.2 * weight.norm()


def test_no_input_but_zeros(loss: Any) -> None:
    weight, statistics = torch.randn(6, 64), Statistics.of(torch.zeros(10, 64))
    found = gptq.quantize(weight, statistics, CONFIGS[0])
    assert (found.dequantize(torch.float32) - weight).norm() < 0.15 * weight.norm()


def test_a_weight_of_zeros(correlated: Any) -> None:
    found = gptq.quantize(torch.zeros(4, 64), Statistics.of(correlated(99, 64)), CONFIGS[0])
    assert not found.dequantize(torch.float32).any()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.label} {config.group_size}")
def test_the_same_from_call_to_call_and_whatever_the_strides(config: WeightConfig, correlated: Any) -> None:
    weight, statistics = torch.randn(128, 40).t(), Statistics.of(correlated(300, 128))
    before = weight.clone()
    found = [gptq.quantize(w, statistics, config) for w in (weight, weight, weight.contiguous())]
    assert all(torch.equal(found[0].integers(), other.integers()) for other in found[1:])
    assert torch.equal(weight, before)


def test_threads_change_no_more_than_rounding(correlated: Any, loss: Any) -> None:
    weight, inputs = torch.randn(64, 512), correlated(3000, 512)
    losses = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        statistics = Statistics.of(inputs)
        losses.append(loss(weight, gptq.quantize(weight, statistics, CONFIGS[2]), statistics))
    assert losses == pytest.approx([losses[0]] * 3, rel=0.02)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(value: float, correlated: Any) -> None:
    weight = torch.randn(3, 128)
    weight[1, 5] = value
    with pytest.raises(UnsupportedError, match="the weight holds NaN or infinity; repair"):
        gptq.quantize(weight, Statistics.of(correlated(9, 128)), CONFIGS[2])


def test_what_does_not_fit_is_refused(correlated: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"group_size=128 .* \[3, 96\]; use group_size=32"):
        gptq.quantize(torch.randn(3, 96), Statistics.of(correlated(9, 96)), CONFIGS[2])
    with pytest.raises(UnsupportedError, match=r"a weight \[3, 128\] has statistics of 96 inputs"):
        gptq.quantize(torch.randn(3, 128), Statistics.of(correlated(9, 96)), CONFIGS[2])


def test_without_statistics_or_by_rtn_it_is_rounded_to_nearest(correlated: Any) -> None:
    weight, statistics = torch.randn(5, 128), Statistics.of(correlated(99, 128))
    expected = rtn.quantize(weight, WeightConfig(bits=4)).integers()
    assert torch.equal(quantize(weight, None, CONFIGS[2]).integers(), expected)
    assert torch.equal(quantize(weight, statistics, WeightConfig(bits=4)).integers(), expected)
    assert not torch.equal(quantize(weight, statistics, CONFIGS[2]).integers(), expected)
