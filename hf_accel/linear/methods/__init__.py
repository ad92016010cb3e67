"""Ways to round a weight to a few bits: to nearest, or by statistics of its inputs from calibration data."""

from __future__ import annotations

from torch import Tensor

from ...config import WeightConfig
from ..formats import QuantizedWeight
from ..input_statistics import Statistics
from . import awq, gptq, rtn


def quantize(weight: Tensor, statistics: Statistics | None, config: WeightConfig) -> QuantizedWeight:
    """Quantize a floating-point weight [out, in] by `config.method`; without statistics, to nearest.

    Raises UnsupportedError for NaN or infinity and for a group size that does not divide the inputs.
    """
    if statistics is None or config.method == "rtn":
        return rtn.quantize(weight, config)
    method = gptq.quantize if config.method == "gptq" else awq.quantize
    return method(weight, statistics, config)


__all__ = ["quantize"]
