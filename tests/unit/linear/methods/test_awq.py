"""AWQ's two searches: ranges of groups, and scales of the inputs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.config import WeightConfig
from hf_accel.errors import UnsupportedError
from hf_accel.linear.input_statistics import Statistics
from hf_accel.linear.methods import awq, rtn

CONFIGS = [
    WeightConfig(bits=bits, group_size=group, symmetric=symmetric, method="awq")
    for bits, group, symmetric in [
        (4, 32, True),
        (4, 32, False),
        (4, 128, True),
        (8, None, True),
        (8, 128, True),
        (3, 32, True),
        (2, 32, False),
    ]
]


def by_group(weight: Tensor, found: Any, statistics: Statistics, group_size: int) -> Tensor:
    """d H d of each output and group [out, groups], in float64."""
    change = (found.dequantize(torch.float64) - weight.double()).view(len(weight), -1, group_size)
    return torch.einsum("ogi,gij,ogj->og", change, statistics.blocks(group_size).double(), change)


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.label} {config.group_size}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_group_loses_more_than_rounded_to_nearest(config: WeightConfig, dtype: Any, correlated: Any) -> None:
    for seed, (outputs, rows) in enumerate(itertools.product([1, 9, 50], [1, 40, 1000])):
        torch.manual_seed(seed)
        weight, statistics = torch.randn(outputs, 256).to(dtype), Statistics.of(correlated(rows, 256))
        group_size = config.group_size or 256
        ours = by_group(weight, awq.quantize(weight, statistics, config), statistics, group_size)
        nearest = by_group(weight, rtn.quantize(weight, config), statistics, group_size)
        # Symmetric without a zero point, the widest range has one level more on the larger side, and the others lie
        # elsewhere: of many groups nearly all are better, and what they lose in all is less.
        assert ours.sum() <= nearest.sum()
        assert (ours <= nearest * (1 + 1e-3)).double().mean() > 0.9


def test_the_integers_are_those_nearest_to_the_weight(correlated: Any) -> None:
    weight, statistics = torch.randn(20, 128), Statistics.of(correlated(300, 128))
    found = awq.quantize(weight, statistics, CONFIGS[0])
    scales = found.weight_scale.repeat_interleave(32, dim=1)
    assert torch.equal(found.integers().float(), (weight / scales).round().clamp(-8, 7))
    assert (found.weight_scale < 0).any() and (found.weight_scale > 0).any()


def test_large_inputs_get_large_scales(loss: Any) -> None:
    inputs = torch.randn(2000, 128)
    inputs[:, [5, 70]] *= 60
    weight, statistics = torch.randn(64, 128), Statistics.of(inputs)
    scales = awq.channel_scales([weight], statistics, CONFIGS[2])
    assert scales[[5, 70]].min() > 1.5 * scales.median()
    scaled = awq.quantize(weight, statistics.divided(scales), CONFIGS[2]).dequantize(torch.float32) / scales
    plain = awq.quantize(weight, statistics, CONFIGS[2]).dequantize(torch.float32)
    losses = [float(((w - weight) @ statistics.hessian * (w - weight)).sum()) for w in (scaled, plain)]
    assert losses[0] < 0.9 * losses[1]


def test_scales_are_of_all_weights_that_are_called_on_one_tensor(correlated: Any) -> None:
    statistics = Statistics.of(correlated(500, 64))
    weights = [torch.randn(outputs, 64) for outputs in (40, 8, 8)]
    scales = awq.channel_scales(weights, statistics, CONFIGS[0])
    assert scales.shape == (64,) and scales.dtype == torch.float32 and (scales > 0).all()
    assert (scales.max() * scales.min()).item() == pytest.approx(1, rel=1e-3)
    joined = awq.channel_scales([torch.cat(weights)], statistics, CONFIGS[0])
    assert joined.shape == scales.shape


@pytest.mark.parametrize("rows", [torch.zeros(9, 64), torch.ones(1, 64), 1e-30 * torch.ones(9, 64)])
def test_inputs_that_say_little(rows: Tensor) -> None:
    weight, statistics = torch.randn(6, 64), Statistics.of(rows)
    scales = awq.channel_scales([weight], statistics, CONFIGS[0])
    assert scales.isfinite().all() and (scales > 0).all()
    found = awq.quantize(weight, statistics.divided(scales), CONFIGS[0]).dequantize(torch.float32) / scales
    assert (found - weight).norm() < 0.2 * weight.norm()


def test_a_weight_of_zeros(correlated: Any) -> None:
    statistics = Statistics.of(correlated(99, 64))
    assert awq.channel_scales([torch.zeros(4, 64)], statistics, CONFIGS[0]).isfinite().all()
    assert not awq.quantize(torch.zeros(4, 64), statistics, CONFIGS[0]).dequantize(torch.float32).any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(value: float, correlated: Any) -> None:
    weight, statistics = torch.randn(3, 128), Statistics.of(correlated(9, 128))
    weight[1, 5] = value
    for call in (
        lambda: awq.quantize(weight, statistics, CONFIGS[2]),
        lambda: awq.channel_scales([weight], statistics, CONFIGS[2]),
    ):
        with pytest.raises(UnsupportedError, match="the weight holds NaN or infinity; repair"):
            call()


def test_what_does_not_fit_is_refused(correlated: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"group_size=128 .* \[3, 96\]; use group_size=32"):
        awq.quantize(torch.randn(3, 96), Statistics.of(correlated(9, 96)), CONFIGS[2])
    with pytest.raises(UnsupportedError, match=r"a weight \[3, 128\] has statistics of 96 inputs"):
        awq.channel_scales([torch.randn(3, 128)], Statistics.of(correlated(9, 96)), CONFIGS[2])
