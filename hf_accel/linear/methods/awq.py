"""AWQ: inputs that are large on average are scaled up before rounding, and ranges of groups are clipped.

Source: Lin, Tang, Tang, Yang, Chen, Wang, Dang, Gan, Han: AWQ, 2024. The scales have to be taken off the inputs again,
by what computes them; where that is not possible the search for clips remains.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...config import WeightConfig
from ..formats import QuantizedWeight
from ..input_statistics import Statistics
from .levels import Levels, checked_rows, group_size_of

STEPS, FEW_STEPS = 48, 8  # ranges that are tried for each group, and while scales are compared
OUTPUTS = 128  # of each weight that scales are compared on
EXPONENTS = (0.0, 0.25, 0.5, 0.75)  # of the magnitudes of inputs; 0 leaves them as they are
INVERSE = (0.0, 0.5, 1.0)  # and of those of their weights
LARGEST_FACTOR = 1e3  # times the smallest magnitude that differs from zero


def quantize(weight: Tensor, statistics: Statistics, config: WeightConfig) -> QuantizedWeight:
    """Round a floating-point weight [out, in] to nearest, each group over the range that makes its error least.

    Raises UnsupportedError for NaN or infinity, a group size that does not divide the inputs, and statistics of
    another number of inputs.
    """
    levels = Levels.of(config)
    rows = checked_rows(weight, statistics, config)
    integers, scale, zeros = _rounded(rows, weight, statistics, levels=levels, config=config, steps=STEPS)
    return levels.pack(integers, scale.squeeze(-2), None if zeros is None else zeros.squeeze(-2), weight.dtype)


def channel_scales(weights: Sequence[Tensor], statistics: Statistics, config: WeightConfig) -> Tensor:
    """float32 [in]: what the columns of weights [out, in], all called on one tensor, are multiplied by.

    Powers of the mean magnitudes of the inputs, divided by powers of those of their weights, relative to the largest
    weight of the group; of several exponents those whose rounded weights give the least squared error, on up to
    OUTPUTS outputs of each. All ones, if no scaling is better.
    """
    rows = [checked_rows(weight, statistics, config) for weight in weights]
    ranges = [_relative(row, group_size_of(weight, config)) for row, weight in zip(rows, weights, strict=True)]
    relative = torch.stack(ranges).mean(0)
    some = [weight[:: -(-len(weight) // OUTPUTS)] for weight in weights]
    best, chosen = None, torch.ones_like(statistics.magnitudes)
    for exponent, inverse in itertools.product(EXPONENTS, INVERSE):
        tried = _balanced(_power(statistics.magnitudes, exponent) / _power(relative, inverse))
        divided = statistics.divided(tried)
        error = sum(_error(weight, divided, config) for weight in some)
        if best is None or error < best:
            best, chosen = error, tried
    return chosen


def _rounded(
    rows: Tensor, weight: Tensor, statistics: Statistics, *, levels: Levels, config: WeightConfig, steps: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Integers [in, out] of rows [in, out]; scales in the weight's dtype and zero points, [groups, 1, out]."""
    group_size = group_size_of(weight, config)
    groups = rows.view(-1, group_size, rows.shape[1])
    scale, zeros = levels.search(groups, statistics.blocks(group_size), weight.dtype, steps=steps)
    return levels.round(groups, scale, zeros).view(rows.shape), scale, zeros


def _error(weight: Tensor, statistics: Statistics, config: WeightConfig) -> float:
    """Squared error of the outputs of a weight [out, in], rounded over a few ranges."""
    levels, rows = Levels.of(config), checked_rows(weight, statistics, config)
    integers, scale, zeros = _rounded(rows, weight, statistics, levels=levels, config=config, steps=FEW_STEPS)
    groups = integers.view(len(scale), -1, rows.shape[1])
    change = levels.restore(groups, scale, zeros).view(rows.shape).sub_(rows)
    return float((statistics.hessian @ change).mul_(change).sum(dtype=torch.float64))


def _relative(rows: Tensor, group_size: int) -> Tensor:
    """The mean magnitudes [in] of weights [in, out], each relative to the largest of its group."""
    groups = rows.view(-1, group_size, rows.shape[1]).abs()
    return (groups / groups.amax(-2, keepdim=True).clamp(min=1e-30)).mean(-1).flatten()


def _power(magnitudes: Tensor, exponent: float) -> Tensor:
    return magnitudes.clamp(min=magnitudes.max().clamp(min=1e-30) / LARGEST_FACTOR).pow(exponent)


def _balanced(scales: Tensor) -> Tensor:
    """The largest and the smallest lie equally far from 1."""
    return scales / (scales.max() * scales.min()).sqrt()
