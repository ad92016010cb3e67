"""Short causal convolutions of each channel, whose last inputs stay in pages."""

from __future__ import annotations

from ctypes import Structure

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import ACTIVATIONS, DTYPES, as_rows, fields, kernel, refuse_gradients, threads


class ConvCall(Structure):
    _fields_ = fields(
        pointers="x weight out kept starts before slots", sizes="x_stride sequences channels length",
        ints="activation dtype weight_dtype threads",
    )  # fmt: skip


_short_conv = kernel("short_conv", ConvCall)


def short_conv(
    x: Tensor, weight: Tensor, *, kept: Tensor, starts: Tensor, before: Tensor, slots: Tensor
) -> Tensor:  # fmt: skip
    """Compute silu of the sum of each channel's last L inputs times its weights, for the tokens of B sequences.

    The sequences stand end to end. x: [N, C], weight: [C, L], each of a dtype of FLOATS. kept: [slots, L - 1, C]
    float32, contiguous, the last inputs up to a token. starts, before, slots: see delta_rule.
    Returns [N, C] float32, the numbers of x's dtype. Raises UnsupportedError if a gradient is needed.
    """
    refuse_gradients("short_conv", x, weight)
    x, stride = as_rows(x)
    weight = weight.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    _short_conv(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), kept.data_ptr(), starts.data_ptr(), before.data_ptr(),
        slots.data_ptr(), stride, len(before), *weight.shape, ACTIVATIONS["silu"], DTYPES[x.dtype],
        DTYPES[weight.dtype], threads(),
    )  # fmt: skip
    return out


def reference(x: Tensor, weight: Tensor, *, kept: Tensor, starts: Tensor, before: Tensor, slots: Tensor) -> Tensor:
    """Compute what `short_conv` computes, by torch's operators. The inputs are written in place."""
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
        out.append(F.silu(total.to(x.dtype)))
        for t in range(first, stop):
            if slots[t] >= 0:
                kept[slots[t]] = row[t - first + 1 : t - first + 1 + count].detach().float()
    return torch.cat(out).float()
