"""Attention in float64, one query at a time, over an explicit list of visible keys."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.5e-2, 1e-2), torch.float16: (2e-3, 2e-3)}


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = True,
    mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, Q, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] -> [B, Q, Hq, Dv] and lse [B, Q, Hq], float64."""
    batch, num_heads, num_queries, _ = q.shape
    num_keys, group = k.shape[2], num_heads // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    if mask is not None:
        mask = mask.expand(batch, num_heads, num_queries, num_keys)
        mask = torch.where(mask, 0.0, float("-inf")) if mask.dtype == torch.bool else mask
    out = torch.zeros(batch, num_queries, num_heads, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, num_queries, num_heads), float("-inf"), dtype=torch.float64)
    for b in range(batch):
        for h in range(num_heads):
            for i in range(num_queries):
                position = num_keys - num_queries + i
                total = torch.zeros((), dtype=torch.float64)
                if sinks is not None:
                    total = total + sinks[h].double().exp()
                numerator = torch.zeros(v.shape[3], dtype=torch.float64)
                keys = []
                for j in range(num_keys):
                    if causal and j > position:
                        continue
                    if window is not None and position - j >= window:
                        continue
                    if mask is not None and mask[b, h, i, j] == float("-inf"):
                        continue
                    keys.append(j)
                if keys:
                    scores = (k[b, h // group, keys] * q[b, h, i]).sum(-1) * scale
                    if softcap is not None:
                        scores = torch.tanh(scores / softcap) * softcap
                    if mask is not None:
                        scores = scores + mask[b, h, i, keys].double()
                    numerator = (scores.exp().unsqueeze(1) * v[b, h // group, keys]).sum(0)
                    total = total + scores.exp().sum()
                    out[b, i, h] = numerator / total
                lse[b, i, h] = total.log()
    return out, lse


def assert_close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype = torch.float32) -> None:
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=rtol)
