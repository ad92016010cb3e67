"""The gated delta rule over states in pages (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464).

Decays of each number of a key are those of Kimi Delta Attention (Kimi Team 2025, "Kimi Linear", arXiv 2510.26692).
"""

from __future__ import annotations

from ctypes import Structure
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import DTYPES, fields, kernel, refuse_gradients, threads

EPSILON = 1e-6  # is added to the square of a length


class DeltaCall(Structure):
    _fields_ = fields(
        pointers="q k v a b log_rate bias decays out states starts before slots",
        sizes="q_stride k_stride v_stride a_stride b_stride sequences key_heads value_heads key_dim value_dim",
        floats="beta_factor",
        ints="dtype rate_dtype bias_dtype threads",
    )


_delta_rule = kernel("delta_rule", DeltaCall)


class DeltaInputs(NamedTuple):
    """The numbers that the rule reads of the N tokens of all sequences, which stand end to end.

    q, k: [N, Hk, Dk] float32, which are divided by their lengths, and q by the root of Dk. v: [N, Hv, Dv] float32.
    b: [N, Hv] of a dtype of FLOATS. a: likewise; log_rate, bias: of the heads, [Hv] of any of them, contiguous:
    these three make one decay of each head. decays: [N, Hv, Dk] float32 in their place, and they are then None.
    beta_factor: of beta.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor | None
    b: Tensor
    log_rate: Tensor | None = None
    bias: Tensor | None = None
    decays: Tensor | None = None
    beta_factor: float = 1.0


def delta_rule(inputs: DeltaInputs, *, states: Tensor, starts: Tensor, before: Tensor, slots: Tensor) -> Tensor:
    """Compute S = decay S; S = S + k (beta (v - k S)); out = q S for the tokens of B sequences.

    decay is exp(-exp(log_rate) softplus(a + bias)) or given, and beta is beta_factor sigmoid(b). states: [slots, Hv,
    Dk, Dv] float32, contiguous. starts: [B + 1] int64. before: [B] int64, the slot of S before a sequence's first
    token, -1 for zeros. slots: [N] int64, where S is written after a token, -1 for nowhere. Each slot is written once,
    and none of `before` is.
    Returns [N, Hv, Dv] float32. Raises UnsupportedError if a gradient is needed.
    """
    q, k, v, a, b, log_rate, bias, decays, beta_factor = inputs
    refuse_gradients("delta_rule", q, k, v, a, b, decays)
    q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v))
    decays = None if decays is None else decays.float().contiguous()
    a, b = None if a is None else _in_rows(a.to(b.dtype)), _in_rows(b)
    out = torch.empty(v.shape, dtype=torch.float32, device="cpu")
    _delta_rule(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), _address(a), b.data_ptr(), _address(log_rate), _address(bias),
        _address(decays), out.data_ptr(), states.data_ptr(), starts.data_ptr(), before.data_ptr(), slots.data_ptr(),
        q.stride(0), k.stride(0), v.stride(0), 0 if a is None else a.stride(0), b.stride(0), len(before),
        k.shape[1], v.shape[1], k.shape[2], v.shape[2], beta_factor, DTYPES[b.dtype], _dtype(log_rate), _dtype(bias),
        threads(),
    )  # fmt: skip
    return out


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _dtype(x: Tensor | None) -> int:
    return DTYPES[torch.float32 if x is None else x.dtype]


def reference(inputs: DeltaInputs, *, states: Tensor, starts: Tensor, before: Tensor, slots: Tensor) -> Tensor:
    """Compute what `delta_rule` computes, by torch's operators. The states are written in place."""
    q, k, v, a, b, log_rate, bias, decays, beta_factor = inputs
    beta = b.sigmoid().float() * beta_factor
    if decays is None:
        assert a is not None and log_rate is not None and bias is not None
        decays = torch.exp(-log_rate.float().exp() * F.softplus(a.float() + bias))[..., None]
    repeats, size = v.shape[1] // k.shape[1], k.shape[2]
    k = _divided(k).repeat_interleave(repeats, 1)
    q = (_divided(q) / size**0.5).repeat_interleave(repeats, 1)
    out: list[Tensor] = []
    for sequence, slot in enumerate(before.tolist()):
        state = states.new_zeros(states.shape[1:]) if slot < 0 else states[slot].clone()
        for t in range(int(starts[sequence]), int(starts[sequence + 1])):
            state = state * decays[t, :, :, None]
            memory = (state * k[t, :, :, None]).sum(1)
            state = state + k[t, :, :, None] * ((v[t] - memory) * beta[t, :, None])[:, None]
            out.append((state * q[t, :, :, None]).sum(1))
            if slots[t] >= 0:
                states[slots[t]] = state.detach()
    return torch.stack(out) if out else v.new_empty(v.shape)


def _divided(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)
