"""The numbers that a format can store, the search for the scales that suit a weight best, and the weight as the
calibrated methods read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...config import WeightConfig
from ...errors import UnsupportedError
from ..formats import Layout, QuantizedWeight, check_group_size, kind_of
from ..input_statistics import Statistics
from .rtn import refuse_not_finite

LEAST = 0.4  # of the range of a group that is still covered at the most clipped end of the search


@dataclass(frozen=True)
class Levels:
    """The integers of a format: lowest to highest, with a zero point in each group or without."""

    layout: Layout
    lowest: int
    highest: int
    has_zero_points: bool

    @classmethod
    def of(cls, config: WeightConfig) -> Levels:
        layout, half = config.layout, 1 << config.bits - 1
        return cls(layout, -127 if layout.bits == 8 else -half, half - 1, not layout.symmetric)

    def extent(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Return the range of groups [..., group, out] that the levels must cover: the lowest and the highest value,
        [..., 1, out].

        0 is always among them. Without zero points both are the largest magnitude; if there is one level more below
        zero than above, it is negative where a negative scale uses that level.
        """
        low, high = groups.amin(-2, keepdim=True).clamp(max=0), groups.amax(-2, keepdim=True).clamp(min=0)
        if self.has_zero_points:
            return low, high
        largest = torch.maximum(-low, high)
        if -self.lowest > self.highest:
            largest = torch.where(-low < high, -largest, largest)
        return largest, largest

    def scales(self, extent: tuple[Tensor, Tensor], share: float, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The scales, as `dtype` stores them, and zero points, if the levels cover a share of the extent."""
        low, high = extent
        if not self.has_zero_points:
            return _stored(high * (share / self.highest), dtype), None
        scale = _stored((high / 2 - low / 2) * (2 * share / (self.highest - self.lowest)), dtype)
        zeros = (self.lowest - low * share / _divisor(scale)).round_().clamp_(self.lowest, self.highest)
        return scale, zeros

    def round(self, values: Tensor, scale: Tensor, zeros: Tensor | None) -> Tensor:
        """Return the integers nearest to values, as floats."""
        levels = (values / _divisor(scale)).round_()
        return (levels if zeros is None else levels.add_(zeros)).clamp_(self.lowest, self.highest)

    def restore(self, integers: Tensor, scale: Tensor, zeros: Tensor | None) -> Tensor:
        """Return the values that integers stand for."""
        return integers * scale if zeros is None else (integers - zeros) * scale

    def search(
        self, groups: Tensor, importance: Tensor, dtype: torch.dtype, *, steps: int
    ) -> tuple[Tensor, Tensor | None]:
        """`scales` with the share, for each group and output, that makes the error least; `steps` of them are tried.

        importance: [..., group, 1], weights of the squared errors of the inputs, or [..., group, group], the Hessian
            of the group.
        """
        whole = importance.shape[-1] > 1
        best, scale, zeros, extent = None, None, None, self.extent(groups)
        for step in range(steps):
            tried, tried_zeros = self.scales(extent, 1 - (1 - LEAST) * step / steps, dtype)
            change = self.restore(self.round(groups, tried, tried_zeros), tried, tried_zeros).sub_(groups)
            weighted = importance @ change if whole else importance * change
            error = weighted.mul_(change).sum(-2, keepdim=True)
            if best is None or scale is None:
                best, scale, zeros = error, tried, tried_zeros
                continue
            better = error < best
            best = torch.where(better, error, best)
            scale = torch.where(better, tried, scale)
            if zeros is not None and tried_zeros is not None:
                zeros = torch.where(better, tried_zeros, zeros)
        assert scale is not None
        return scale, zeros

    def pack(self, integers: Tensor, scale: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> QuantizedWeight:
        """The stored form of integers [in, out], and scales and zero points [groups, out]."""
        stored, scales = integers.t().contiguous().to(torch.int8), scale.t().contiguous().to(dtype)
        zero_point = [] if zeros is None else [zeros.t().contiguous().to(torch.int8)]
        made: QuantizedWeight = kind_of(self.layout).from_integers(stored, scales, *zero_point)
        return made


def group_size_of(weight: Tensor, config: WeightConfig) -> int:
    """Inputs that share a scale. Raises UnsupportedError unless groups divide the inputs of a weight [out, in]."""
    group_size = config.layout.group_size
    if group_size is None:
        return weight.shape[1]
    check_group_size((weight.shape[0], weight.shape[1]), group_size)
    return group_size


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return scale.to(dtype).to(scale.dtype)


def _divisor(scale: Tensor) -> Tensor:
    return scale.masked_fill(scale == 0, 1)


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
