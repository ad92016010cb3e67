"""Round to nearest: quantize a weight from its own values, without calibration."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ...config import WeightConfig
from ...errors import UnsupportedError
from ..activations import LARGEST_NUMBER
from ..formats import FLOAT8, Float4Weight, Layout, QuantizedWeight, check_group_size, chunks, kind_of


def quantize(weight: Tensor, config: WeightConfig) -> QuantizedWeight:
    """Quantize a floating-point weight [out, in] as `config` says; scales get the weight's dtype.

    Symmetric, 8 bits: the largest magnitude of an output channel, or of a group of inputs, becomes 127, 448 in FP8.
    Symmetric, fewer bits: the number of largest magnitude in a group of inputs becomes the lowest level, -8, -4 or -2,
    by a negative scale if it is positive (ggml's Q4_0), so that no level is lost. Asymmetric, fewer bits: the range of
    a group, widened to hold 0, is cut into 15, 7 or 3 steps, and a zero point says which level is 0, exactly. The
    error is at most half a step, or one for a number opposite to the largest and nearly as large, and what rounding
    the scale to its dtype cuts off.
    Raises UnsupportedError for NaN or infinity and for a group size that does not divide the inputs.
    """
    weight = weight.detach()
    out_features, in_features = weight.shape
    if config.layout.group_size is not None:
        check_group_size((out_features, in_features), config.layout.group_size)
    return _rounded(weight, config.layout)


def quantize_like(weight: Tensor, other: QuantizedWeight) -> QuantizedWeight:
    """Quantize a floating-point weight [out, in] with the bits, groups and order of inputs that `other` has.

    Scales get the dtype of `other`'s. Minima are replaced by zero points, which hold 0 exactly. Raises
    UnsupportedError for NaN and infinity.
    """
    order, weight = other.input_order, weight.detach()
    weight = weight if order is None else weight.index_select(1, order)
    if not isinstance(other, Float4Weight):
        return _rounded(weight, other.layout).changed(input_order=order)
    if not weight.isfinite().all():
        refuse_not_finite()
    return other.rounded(weight).changed(input_order=order)


def _rounded(weight: Tensor, layout: Layout) -> QuantizedWeight:
    """Round a weight to a layout; a scale_dtype of None is the weight's dtype."""
    is_lopsided = layout.bits < 8 and not layout.symmetric
    rounding = _round_asymmetric if is_lopsided else _round
    made: QuantizedWeight = kind_of(layout).from_integers(*rounding(weight, layout))
    return made


def _round(weight: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Levels [out, in] and scales [out, groups] of the layout's dtype, a chunk of outputs at a time."""
    bits, is_fp8 = layout.bits, layout.format == "fp8"
    half, largest = 1 << bits - 1, LARGEST_NUMBER["fp8" if is_fp8 else "int8"]
    stored = FLOAT8 if is_fp8 else torch.int8
    integers = torch.empty_like(weight, dtype=stored, memory_format=torch.contiguous_format)
    scale = weight.new_empty(len(weight), layout.groups(weight.shape[1]), dtype=layout.scale_dtype)
    group_size = weight.shape[1] // scale.shape[1]
    for outputs in chunks(len(weight)):
        groups = weight[outputs].reshape(-1, scale.shape[1], group_size)  # [outputs, groups, group]
        low, high = groups.aminmax(dim=-1)
        absmax = torch.maximum(-low, high).abs()  # without a negative zero
        if not absmax.isfinite().all():
            refuse_not_finite()
        scale[outputs] = _wide(absmax) / (largest if bits == 8 else torch.where(high > -low, -half, half))
        # The stored scale is the divisor: what is rounded here is what dequantize multiplies back.
        divisor = _wide(scale[outputs]).masked_fill(scale[outputs] == 0, 1).unsqueeze(-1)
        levels = _wide(groups) / divisor
        levels = levels if is_fp8 else levels.round_()
        levels.clamp_(-largest if bits == 8 else -half, largest if bits == 8 else half - 1)
        integers[outputs] = levels.flatten(-2).to(stored)
    return integers, scale


def _round_asymmetric(weight: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """int8 [out, in], scales and int8 zero points [out, groups], both integers less half of the levels."""
    half, groups_of_row = 1 << layout.bits - 1, layout.groups(weight.shape[1])
    group_size = weight.shape[1] // groups_of_row
    steps = 2 * half - 1
    integers = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale = weight.new_empty(len(weight), groups_of_row, dtype=layout.scale_dtype)
    zero_point = torch.empty_like(scale, dtype=torch.int8)
    for outputs in chunks(len(weight)):
        groups = _wide(weight[outputs]).reshape(-1, groups_of_row, group_size)  # [outputs, groups, group]
        low, high = groups.aminmax(dim=-1)
        if not (low.isfinite().all() and high.isfinite().all()):
            refuse_not_finite()
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale[outputs] = (high / 2 - low / 2) / (steps / 2)  # by halves: the range may overflow
        divisor = _wide(scale[outputs]).masked_fill(scale[outputs] == 0, 1)
        zero = (-low / divisor).round_().clamp_(0, steps)
        levels = (groups / divisor.unsqueeze(-1)).round_().add_(zero.unsqueeze(-1)).clamp_(0, steps)
        integers[outputs] = levels.sub_(half).flatten(-2).to(torch.int8)
        zero_point[outputs] = zero.sub_(half).to(torch.int8)
    return integers, scale, zero_point


def refuse_not_finite() -> NoReturn:
    raise UnsupportedError("the weight holds NaN or infinity; repair the checkpoint or skip the layer")


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
