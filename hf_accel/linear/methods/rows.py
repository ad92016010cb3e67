"""A weight as the calibrated methods read it."""

from __future__ import annotations

from torch import Tensor

from ...config import WeightConfig
from ...errors import UnsupportedError
from ..input_statistics import Statistics
from .levels import group_size_of
from .rtn import refuse_not_finite


def checked_rows(weight: Tensor, statistics: Statistics, config: WeightConfig) -> Tensor:
    """float32 [in, out], contiguous, only to be read: a weight [out, in] in any dtype, times statistics.scales.

    All weights of an input lie together.

    Raises UnsupportedError for NaN or infinity, a group size that does not divide the inputs, and statistics of
    another number of inputs.
    """
    group_size_of(weight, config)
    if weight.shape[1] != len(statistics.magnitudes):
        raise UnsupportedError(
            f"a weight [{weight.shape[0]}, {weight.shape[1]}] has statistics of {len(statistics.magnitudes)} inputs"
        )
    rows = weight.detach().float().t().contiguous()
    if not rows.isfinite().all():
        refuse_not_finite()
    return rows if statistics.scales is None else rows * statistics.scales.unsqueeze(1)
