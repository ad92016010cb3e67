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
from .levels import Levels, group_size_of
from .rows import checked_rows

STEPS = 48  # ranges that are tried for each group
EXPONENTS = (0.0, 0.2, 0.4, 0.6, 0.8)  # of the magnitudes of inputs; 0 leaves them as they are
INVERSE = (0.0, 0.33, 0.67, 1.0)  # and of those of their weights
LARGEST = 1e3  # times the smallest magnitude that is told apart from zero


def quantize(weight: Tensor, statistics: Statistics, config: WeightConfig) -> QuantizedWeight:
    """Round a floating-point weight [out, in] to nearest, each group over the range that makes its error least.

    Raises UnsupportedError for NaN or infinity, a group size that does not divide the inputs, and statistics of
    another number of inputs.
    """
    rows, levels, group_size = (
        checked_rows(weight, statistics, config),
        Levels.of(config),
        group_size_of(weight, config),
    )
    groups = rows.view(-1, group_size, rows.shape[1])
    scale, zeros = levels.search(groups, statistics.blocks(group_size), weight.dtype, steps=STEPS)
    integers = levels.round(groups, scale, zeros).view(rows.shape)
    return levels.pack(integers, scale.squeeze(-2), None if zeros is None else zeros.squeeze(-2), weight.dtype)


def channel_scales(weights: Sequence[Tensor], statistics: Statistics, config: WeightConfig) -> Tensor:
    """float32 [in]: what the columns of weights [out, in], all called on one tensor, are multiplied by.

    Powers of the mean magnitudes of the inputs, divided by powers of those of their weights, relative to the largest
    weight of the group; of several exponents those whose rounded weights give the least squared error of the outputs
    on the sample. All ones, if no scaling is better.
    """
    levels = Levels.of(config)
    rows = [checked_rows(weight, statistics, config) for weight in weights]
    best, chosen = None, torch.ones_like(statistics.magnitudes)
    ranges = [_relative(row, group_size_of(weight, config)) for row, weight in zip(rows, weights, strict=True)]
    relative = torch.stack(ranges).mean(0)
    for exponent, inverse in itertools.product(EXPONENTS, INVERSE):
        tried = _balanced(_power(statistics.magnitudes, exponent) / _power(relative, inverse))
        error = sum(
            _error(
                row,
                tried,
                statistics.sample,
                levels=levels,
                group_size=group_size_of(weight, config),
                dtype=weight.dtype,
            )
            for row, weight in zip(rows, weights, strict=True)
        )
        if best is None or error < best:
            best, chosen = error, tried
    return chosen


def _relative(rows: Tensor, group_size: int) -> Tensor:
    """The mean magnitudes [in] of weights [in, out], each relative to the largest of its group."""
    groups = rows.view(-1, group_size, rows.shape[1]).abs()
    return (groups / groups.amax(-2, keepdim=True).clamp(min=1e-30)).mean(-1).flatten()


def _power(magnitudes: Tensor, exponent: float) -> Tensor:
    return magnitudes.clamp(min=magnitudes.max().clamp(min=1e-30) / LARGEST).pow(exponent)


def _balanced(scales: Tensor) -> Tensor:
    """The largest and the smallest lie equally far from 1."""
    return scales / (scales.max() * scales.min()).sqrt()


def _error(
    rows: Tensor, scales: Tensor, sample: Tensor, *, levels: Levels, group_size: int, dtype: torch.dtype
) -> float:
    """Squared error of the outputs on the sample of weights [in, out] that are rounded after scaling."""
    groups = (rows * scales.unsqueeze(1)).view(-1, group_size, rows.shape[1])
    scale, zeros = levels.scales(groups, 1.0, dtype)
    rounded = levels.restore(levels.round(groups, scale, zeros), scale, zeros).view(rows.shape)
    change = rounded.div_(scales.unsqueeze(1)).sub_(rows)
    return float((sample @ change).square_().sum(dtype=torch.float64))
