"""Which form of attention for which shape: torch's fused kernel or two products, by blocks of query rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blocks import row_blocks
from .grouped import grouped_attention

FEW_ROWS = 16  # up to here products beat the fused kernel on a CPU
ROWS_AT_A_TIME = 256
SCORES_AT_A_TIME = 2**24  # bounds the float32 scores of the products: 64 MB


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float = 0.0,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """q [B, Hq, Q, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] -> [B, Hq, Q, Dv], lse [B, Hq, Q] float32 or None."""
    if q.shape[2] <= FEW_ROWS or softcap is not None or sinks is not None or return_lse:
        size = min(ROWS_AT_A_TIME, max(1, SCORES_AT_A_TIME // max(1, q.shape[0] * q.shape[1] * k.shape[2])))
        blocks = row_blocks(q, k, v, mask, size=size, causal=causal, window=window)
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "return_lse": return_lse}
        parts = [grouped_attention(*block, dropout=dropout, **options) for block in blocks]
        if len(parts) == 1:
            return parts[0]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2) if return_lse else None
    return fused_attention(q, k, v, mask=mask, causal=causal, window=window, scale=scale, dropout=dropout), None


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """torch's own kernel; its causal order is top-left, so that only a square without a mask can use it."""
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout, "enable_gqa": q.shape[1] != k.shape[1]}
    square = mask is None and q.shape[2] == k.shape[2]
    if window is None and (square or not causal):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, **options)
    blocks = row_blocks(q, k, v, mask, size=ROWS_AT_A_TIME, causal=causal, window=window)
    return torch.cat([F.scaled_dot_product_attention(*block, **options) for block in blocks], dim=2)
