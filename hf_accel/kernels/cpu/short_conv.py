"""Short causal convolutions of each channel, whose last inputs stay in pages."""

from __future__ import annotations

from ctypes import Structure
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import ACTIVATIONS, DTYPES, as_rows, fields, kernel, refuse_gradients, threads


class ConvCall(Structure):
    _fields_ = fields(
        pointers="x weight bias out kept starts before slots", sizes="x_stride sequences channels length",
        ints="activation dtype weight_dtype threads",
    )  # fmt: skip


_short_conv = kernel("short_conv", ConvCall)


class ConvInputs(NamedTuple):
    """The inputs of N tokens, which stand end to end, and what they are multiplied by.

    x: [N, C]. weight: [C, L]. bias: [C] of the weight's dtype, or None. Each dtype is one of FLOATS.
    activation: of the sums, a key of ACTIVATIONS.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    activation: str = "silu"


def short_conv(inputs: ConvInputs, *, kept: Tensor, starts: Tensor, before: Tensor, slots: Tensor) -> Tensor:
    """Compute the activation of each channel's last L inputs times its weights, for the tokens of B sequences.

    kept: [slots, L - 1, C] float32, contiguous, the last inputs up to a token. starts, before, slots: see delta_rule.
    Returns [N, C] float32, the numbers of x's dtype. Raises UnsupportedError if a gradient is needed.
    """
    x, weight, bias, activation = inputs
    refuse_gradients("short_conv", x, weight, bias)
    x, stride = as_rows(x)
    weight = weight.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    _short_conv(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), kept.data_ptr(),
        starts.data_ptr(), before.data_ptr(), slots.data_ptr(), stride, len(before), *weight.shape,
        ACTIVATIONS[activation], DTYPES[x.dtype], DTYPES[weight.dtype], threads(),
    )  # fmt: skip
    return out


def reference(inputs: ConvInputs, *, kept: Tensor, starts: Tensor, before: Tensor, slots: Tensor) -> Tensor:
    """Compute what `short_conv` computes, by torch's operators. The inputs are written in place."""
    x, weight, bias, activation = inputs
    count, weight = weight.shape[1] - 1, weight.float()
    out = [x.new_empty(0, x.shape[1])]
    for sequence, slot in enumerate(before.tolist()):
        first, stop = int(starts[sequence]), int(starts[sequence + 1])
        if first == stop:
            continue
        past = x.new_zeros(count, x.shape[1]) if slot < 0 else kept[slot].to(x.dtype)
        row = torch.cat([past, x[first:stop]])
        windows = row.float().unfold(0, count + 1, 1)  # [tokens, C, L]
        total = windows[..., 0] * weight[:, 0]
        for place in range(1, count + 1):
            total = total + windows[..., place] * weight[:, place]
        total = total if bias is None else total + bias.float()
        out.append(getattr(F, activation)(total.to(x.dtype)))
        for t in range(first, stop):
            if slots[t] >= 0:
                kept[slots[t]] = row[t - first + 1 : t - first + 1 + count].detach().float()
    return torch.cat(out).float()
