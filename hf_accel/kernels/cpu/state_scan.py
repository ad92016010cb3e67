"""The scans of state spaces over states in pages: Mamba (Gu and Dao 2023, arXiv 2312.00752) and Mamba 2 (Dao and Gu
2024, arXiv 2405.21060).
"""

from __future__ import annotations

from ctypes import Structure
from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import DTYPES, fields, kernel, refuse_gradients, threads


class ScanCall(Structure):
    _fields_ = fields(
        pointers="x dt b c log_rate bias skip out states starts before slots limited",
        sizes="x_stride dt_stride b_stride c_stride sequences heads groups head_dim state_size",
        floats="lowest highest", ints="each_rate dt_dtype rate_dtype bias_dtype skip_dtype threads",
    )  # fmt: skip


_state_scan = kernel("state_scan", ScanCall)


class ScanInputs(NamedTuple):
    """The numbers that a scan reads of the N tokens of all sequences, which stand end to end.

    x: [N, H, P] float32. b, c: [N, G, S] float32; heads that follow each other share a group. dt: [N, H] of any dtype.
    log_rate, bias, skip: of the heads, [H] of a dtype of FLOATS, contiguous. In Mamba, which has a rate for each
    number of the state, H and G are 1, dt is [N, P], log_rate is [P, S], and bias and skip are [P].
    limits: between which a token's step is. limited: [N] int64, 0 for the tokens whose step has no limits; None if it
    has them for all.
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    log_rate: Tensor
    bias: Tensor
    skip: Tensor
    limits: tuple[float, float] = (0.0, inf)
    limited: Tensor | None = None


def state_scan(inputs: ScanInputs, *, states: Tensor, starts: Tensor, before: Tensor, slots: Tensor) -> Tensor:
    """Compute S = exp(-exp(log_rate) step) S + b (step x); out = c S + skip x for the tokens of B sequences.

    step is softplus(dt + bias) within the limits. states: [slots, H, S, P] float32, contiguous. starts, before, slots:
    see delta_rule. Returns [N, H, P] float32. Raises UnsupportedError if a gradient is needed.
    """
    x, dt, b, c, log_rate, bias, skip, limits, limited = inputs
    refuse_gradients("state_scan", x, dt, b, c)
    x, b, c = (each if each.stride()[1:] == (each.shape[2], 1) else each.contiguous() for each in (x, b, c))
    dt = dt if dt.stride(1) == 1 else dt.contiguous()
    dtypes = (DTYPES[each.dtype] for each in (dt, log_rate, bias, skip))
    out = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    _state_scan(
        x.data_ptr(), dt.data_ptr(), b.data_ptr(), c.data_ptr(), log_rate.data_ptr(), bias.data_ptr(),
        skip.data_ptr(), out.data_ptr(), states.data_ptr(), starts.data_ptr(), before.data_ptr(), slots.data_ptr(),
        0 if limited is None else limited.data_ptr(), x.stride(0), dt.stride(0), b.stride(0), c.stride(0),
        len(before), x.shape[1], b.shape[1], x.shape[2], b.shape[2], *limits, log_rate.ndim > 1, *dtypes, threads(),
    )  # fmt: skip
    return out


def reference(inputs: ScanInputs, *, states: Tensor, starts: Tensor, before: Tensor, slots: Tensor) -> Tensor:
    """Compute what `state_scan` computes, by torch's operators. The states are written in place."""
    x, b, c, skip, rate = inputs.x, inputs.b, inputs.c, inputs.skip.float(), inputs.log_rate.float().exp()
    step, each_rate = _steps(inputs), rate.ndim > 1
    step = step[:, None, None] if each_rate else step[..., None, None]  # [N, H, 1, P or 1]
    decay = torch.exp(-(rate.t() if each_rate else rate[:, None, None]) * step)
    repeats = x.shape[1] // b.shape[1]
    b, c = (each.repeat_interleave(repeats, 1)[..., None] for each in (b, c))  # [N, H, S, 1]
    added, skipped = b * (step * x[:, :, None]), x * (skip if each_rate else skip[:, None])
    out: list[Tensor] = []
    for sequence, slot in enumerate(before.tolist()):
        state = states.new_zeros(states.shape[1:]) if slot < 0 else states[slot].clone()
        for t in range(int(starts[sequence]), int(starts[sequence + 1])):
            state = decay[t] * state + added[t]
            out.append((c[t] * state).sum(1) + skipped[t])
            if slots[t] >= 0:
                states[slots[t]] = state.detach()
    return torch.stack(out) if out else x.new_empty(x.shape)


def _steps(inputs: ScanInputs) -> Tensor:
    step = F.softplus(inputs.dt.float() + inputs.bias)
    limited = step.clamp(*inputs.limits)
    return limited if inputs.limited is None else torch.where(inputs.limited.bool()[:, None], limited, step)
