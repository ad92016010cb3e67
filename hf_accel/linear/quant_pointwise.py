"""A convolution over single rows whose weight is quantized: a linear layer for channels that come before rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layer import QuantLinear
from .replacement import Replacement

LINEAR = "linear"  # the child that holds the weight
SETTINGS_OF_CONVOLUTION = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "groups")


class QuantPointwise(Replacement, nn.Module):
    """Multiplies [B, in, T] by the weight of `linear`: [B, out, T]."""

    in_channels: int
    out_channels: int
    padding: Any

    def __init__(self, original: Any, linear: QuantLinear) -> None:
        """original: the nn.Conv1d whose place it takes, or another one of these."""
        super().__init__()
        vars(self).update({name: vars(original)[name] for name in SETTINGS_OF_CONVOLUTION})
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x.transpose(1, 2)).transpose(1, 2)
        return result

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.linear.compute_dtype

    def original(self, *, device: str | None = None) -> nn.Module:
        linear: Any = self.linear.original(device=device)
        made: nn.Conv1d = nn.Conv1d(
            self.in_channels, self.out_channels, 1, bias=self.bias is not None, dtype=self.compute_dtype, device="meta"
        )
        made.weight = nn.Parameter(linear.weight.detach()[..., None], linear.weight.requires_grad)
        made.bias = linear.bias
        made.padding = self.padding
        return made.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size=(1,)"
