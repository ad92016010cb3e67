"""Round to nearest: quantize a weight from its own values, without calibration."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ..config import WeightConfig
from ..errors import UnsupportedError
from .formats import Int4Weight, Int8Weight, QuantizedWeight, check_group_size, chunks


def quantize(weight: Tensor, config: WeightConfig) -> QuantizedWeight:
    """Quantize a floating-point weight [out, in] as `config` says; scales get the weight's dtype.

    The largest magnitude of an output channel (8 bits) or group of inputs (4 bits) becomes 127 or 7.
    Raises UnsupportedError for NaN or infinity and for a group size that does not divide the inputs.
    """
    weight = weight.detach()
    out_features, in_features = weight.shape
    if config.bits == 8:
        return Int8Weight.from_integers(*_round(weight, in_features, largest=127, lowest=-127))
    check_group_size((out_features, in_features), config.group_size)
    return Int4Weight.from_integers(*_round(weight, config.group_size, largest=7, lowest=-8))


def _round(weight: Tensor, group_size: int, *, largest: int, lowest: int) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and scales [out, groups], a chunk of outputs at a time."""
    integers = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale = weight.new_empty(len(weight), weight.shape[1] // group_size)
    for outputs in chunks(len(weight)):
        groups = weight[outputs].reshape(-1, scale.shape[1], group_size)  # [outputs, groups, group]
        absmax = groups.abs().amax(dim=-1)
        if not absmax.isfinite().all():
            refuse_not_finite()
        scale[outputs] = _wide(absmax) / largest
        # The stored scale is the divisor: what is rounded here is what dequantize multiplies back.
        divisor = _wide(scale[outputs]).masked_fill(scale[outputs] == 0, 1).unsqueeze(-1)
        levels = (_wide(groups) / divisor).round_().clamp_(lowest, largest)
        integers[outputs] = levels.flatten(-2).to(torch.int8)
    return integers, scale


def refuse_not_finite() -> NoReturn:
    raise UnsupportedError("the weight holds NaN or infinity; repair the checkpoint or skip the layer")


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
