"""A convolution whose weight is quantized: a linear layer, of which each input is a window of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..recognition.window_products import channels_last, row_windows
from .layer import QuantLinear
from .replacement import Replacement

LINEAR = "linear"  # the child that holds the weight
SETTINGS_OF_CONVOLUTION = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "groups")


class QuantConvolution(Replacement, nn.Module):
    """Convolves [B, in, T], or [in, T], by the weight of `linear`: [B, out, windows]."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int]
    stride: tuple[int]
    padding: Any

    def __init__(self, original: Any, linear: QuantLinear) -> None:
        """original: the nn.Conv1d whose place it takes, or another one of these."""
        super().__init__()
        vars(self).update({name: vars(original)[name] for name in SETTINGS_OF_CONVOLUTION})
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(row_windows(channels_last(self, x), self)).mT
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
            self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding,
            bias=self.bias is not None, dtype=self.compute_dtype, device="meta",
        )  # fmt: skip
        weight = linear.weight.detach()
        weight = weight.unflatten(1, (*self.kernel_size, self.in_channels)).mT.contiguous()
        made.weight = nn.Parameter(weight, linear.weight.requires_grad)
        made.bias = linear.bias
        return made.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
