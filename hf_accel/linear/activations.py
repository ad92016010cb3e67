"""Dynamic INT8 activations: one scale per row, taken from the row itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST = torch.finfo(torch.float32).tiny


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, in] -> integers -127..127 held in float32 [rows, in], and float32 scales [rows, 1].

    A row of zeros gives zeros. A row that holds NaN or infinity gets the scale NaN, which keeps it
    not a number after the matmul without touching the other rows.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True).div_(127)
    scale.nan_to_num_(nan=math.nan, posinf=math.nan).clamp_(min=SMALLEST)
    return (x / scale).round_(), scale
