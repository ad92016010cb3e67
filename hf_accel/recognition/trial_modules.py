"""Makes modules of torch for trials, with weights that are drawn for them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .trial import RandomNumbers


@torch.no_grad()
def draw_weights(parts: Iterable[nn.Module], numbers: RandomNumbers) -> None:
    """Draw the weights of parts for a trial so that each gives about as large numbers as it is given.

    Layers behind each other would else give so large numbers that rounding alone exceeds what a trial allows.
    """
    for part in parts:
        for parameter in part.parameters():
            inputs = parameter[0].numel() if parameter.ndim > 1 else 1
            parameter.copy_(numbers(*parameter.shape) * inputs**-0.5)


def trial_linear(inputs: int, outputs: int) -> nn.Linear:
    """Make a linear layer for a trial, without a bias; takes none of the user's random numbers."""
    made: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)  # type: ignore[no-untyped-call]
    return made


def trial_convolution(channels: int, length: int, *, bias: bool) -> nn.Conv1d:
    """Make a causal convolution of each channel for a trial; takes none of the user's random numbers."""
    made: nn.Conv1d = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Conv1d, channels, channels, length, groups=channels, padding=length - 1, bias=bias
    )
    return made
