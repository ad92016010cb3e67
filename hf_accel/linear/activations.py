"""Dynamic INT8 activations: one scale per row, or per row and group of inputs, taken from the values themselves."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
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


def round_groups(x: Tensor, group: int) -> Tensor:
    """x [rows, in] rounded to 8 bits in each row and group of inputs, in float32; as the native kernels do.

    A group whose largest magnitude is below 1e-35 counts as zeros, one that holds NaN or infinity becomes NaN.
    """
    rows, inputs = x.shape
    groups = F.pad(x.float(), (0, -inputs % group)).view(rows, -(-inputs // group), group)
    absmax = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(absmax >= 1e-35, torch.full_like(absmax, 127).div_(absmax), 0)
    rounded = (groups * inverse).round_().mul_(absmax / 127)
    return rounded.where(absmax.isfinite(), torch.nan).flatten(1)[:, :inputs]
