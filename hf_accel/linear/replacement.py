"""Every module that takes the place of a float one answers the questions of `Replacement`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Replacement:
    """A module of ours that takes the place of a float one."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that the float module would have."""
        raise NotImplementedError

    def original(self, *, device: str | None = None) -> nn.Module:
        """Make a float module of the dequantized numbers; device="meta": one of their shapes, without numbers."""
        raise NotImplementedError


def empty_linear(layer: Any) -> nn.Linear:
    """Make a Linear on meta of the sizes of a quantized one, ours or bitsandbytes'."""
    has_bias, dtype = layer.bias is not None, layer.compute_dtype
    return nn.Linear(layer.in_features, layer.out_features, bias=has_bias, dtype=dtype, device="meta")
