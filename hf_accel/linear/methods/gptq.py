"""GPTQ: inputs are rounded one after the other, and those still to come make up for the error of each.

Source: Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, 2023. The inputs with the largest values are rounded first, while
most others are left to make up for them; groups are those of the original order, with scales found beforehand, so that
nothing has to be permuted when the layer runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...config import WeightConfig
from ..formats import QuantizedWeight
from ..input_statistics import Statistics
from .levels import Levels, checked_rows, group_size_of

STEPS = 12  # ranges that are tried for each group
BLOCK_COLUMNS = 128  # inputs whose errors are spread over all later ones at once


def quantize(weight: Tensor, statistics: Statistics, config: WeightConfig) -> QuantizedWeight:
    """Quantize a floating-point weight [out, in] so that its outputs on the calibration data change little.

    Inputs that were zero in all of the data are rounded to nearest, on their own. Scales get the weight's dtype.
    Raises UnsupportedError for NaN or infinity, a group size that does not divide the inputs, and statistics of
    another number of inputs.
    """
    rows, levels, group_size = (
        checked_rows(weight, statistics, config),
        Levels.of(config),
        group_size_of(weight, config),
    )
    groups = rows.view(-1, group_size, rows.shape[1])
    scale, zeros = levels.search(groups, statistics.costs(group_size), weight.dtype, steps=STEPS)
    scale, zeros = scale.squeeze(-2), None if zeros is None else zeros.squeeze(-2)  # [groups, out]
    order, factor = statistics.factor(by_size=True)
    integers = torch.empty_like(rows)
    integers[order] = _round(rows[order], factor, levels, grid=(scale, zeros), group_of=order // group_size)
    return levels.pack(integers, scale, zeros, weight.dtype)


def _round(
    rows: Tensor, factor: Tensor, levels: Levels, *, grid: tuple[Tensor, Tensor | None], group_of: Tensor
) -> Tensor:
    """Integers [in, out] of rows [in, out], which are used up.

    factor: upper [in, in], of the inverse Hessian. grid: scales and zero points [groups, out]. group_of: [in].
    """
    scale, zeros = grid
    integers, groups = torch.empty_like(rows), group_of.tolist()
    diagonal = factor.diagonal().tolist()
    for start in range(0, len(rows), BLOCK_COLUMNS):
        end = min(start + BLOCK_COLUMNS, len(rows))
        errors = torch.empty_like(rows[start:end])
        for i in range(start, end):
            group = groups[i]
            own_scale, own_zeros = scale[group], None if zeros is None else zeros[group]
            integers[i] = levels.round(rows[i], own_scale, own_zeros)
            error = errors[i - start]
            torch.sub(rows[i], levels.restore(integers[i], own_scale, own_zeros), out=error).div_(diagonal[i])
            rows[i + 1 : end].addr_(factor[i, i + 1 : end], error, alpha=-1)
        rows[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    return integers
