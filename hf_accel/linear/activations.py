"""Dynamic INT8 and FP8 activations: one scale per row, or per row and group of inputs, taken from the values."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .formats import FLOAT8

EightBits = Literal["int8", "fp8"]  # what activations are rounded to
SMALLEST = torch.finfo(torch.float32).tiny
LARGEST_NUMBER: dict[EightBits, float] = {"int8": 127.0, "fp8": 448.0}


def quantize_rows(x: Tensor, rounded_to: EightBits = "int8") -> tuple[Tensor, Tensor]:
    """x [rows, in] -> levels, held in float32 [rows, in], and float32 scales [rows, 1].

    A row of zeros gives zeros. A row that holds NaN or infinity gets the scale NaN, which keeps it
    not a number after the matmul without touching the other rows.
    """
    x = x.float()
    scale = _parts(x.abs().amax(dim=-1, keepdim=True), LARGEST_NUMBER[rounded_to])
    scale.nan_to_num_(nan=math.nan, posinf=math.nan).clamp_(min=SMALLEST)
    return _nearest(x / scale, rounded_to), scale


def round_groups(x: Tensor, group: int, rounded_to: EightBits = "int8") -> Tensor:
    """x [rows, in] rounded to 8 bits in each row and group of inputs, in float32; as the native kernels do.

    A group whose largest magnitude is below 1e-35 counts as zeros, one that holds NaN or infinity becomes NaN.
    """
    rows, inputs = x.shape
    groups = F.pad(x.float(), (0, -inputs % group)).view(rows, -(-inputs // group), group)
    absmax = groups.abs().amax(dim=-1, keepdim=True)
    largest = LARGEST_NUMBER[rounded_to]
    inverse = torch.where(absmax >= 1e-35, torch.full_like(absmax, largest).div_(absmax), 0)
    rounded = _nearest(groups * inverse, rounded_to).mul_(_parts(absmax, largest))
    return rounded.where(absmax.isfinite(), torch.nan).flatten(1)[:, :inputs]


def _parts(x: Tensor, number: float) -> Tensor:
    """Return x / number, rounded once: on a GPU torch multiplies by the inverse of a number that is no tensor."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def _nearest(levels: Tensor, rounded_to: EightBits) -> Tensor:
    """The nearest levels; float32 in, float32 out."""
    if rounded_to == "int8":
        return levels.round_()
    return levels.clamp_(-LARGEST_NUMBER["fp8"], LARGEST_NUMBER["fp8"]).to(FLOAT8).float()  # torch gives NaN beyond
