"""Attention in the form that suits its shape: torch's fused kernel or two products, by blocks of query rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.layouts import KV, AttentionOptions
from ..blocks import row_blocks
from .grouped import grouped_attention

PRODUCT_ROWS = 16  # up to here products beat the fused kernel on a CPU
ROWS_AT_A_TIME = 256
SCORES_AT_A_TIME = 2**24  # bounds the float32 scores of the products: 64 MB


def attend(
    q: Tensor, kv: KV, mask: Tensor | None, options: AttentionOptions, *, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """q [B, Hq, Q, D] over a dense kv -> [B, Hq, Q, Dv], lse [B, Hq, Q] float32 or None."""
    if q.shape[2] <= PRODUCT_ROWS or options.softcap is not None or options.sinks is not None or return_lse:
        size = min(ROWS_AT_A_TIME, max(1, SCORES_AT_A_TIME // max(1, q.shape[0] * q.shape[1] * kv.k.shape[2])))
        blocks = row_blocks(q, kv, mask, options, size=size)
        parts = [grouped_attention(*block, options, return_lse=return_lse) for block in blocks]
        if len(parts) == 1:
            return parts[0]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2) if return_lse else None
    return fused_attention(q, kv, mask, options), None


def fused_attention(q: Tensor, kv: KV, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Call torch's own kernel; its causal order is top-left, so only a square without a mask can use it."""
    square = mask is None and q.shape[2] == kv.k.shape[2]
    if options.window is None and (square or not options.causal):
        return _sdpa(q, kv, mask, options, causal=options.causal)
    blocks = row_blocks(q, kv, mask, options, size=ROWS_AT_A_TIME)
    return torch.cat([_sdpa(*block, options) for block in blocks], dim=2)


def _sdpa(q: Tensor, kv: KV, mask: Tensor | None, options: AttentionOptions, *, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(
        q, kv.k, kv.v, mask, options.dropout, causal, scale=options.scale, enable_gqa=q.shape[1] != kv.k.shape[1]
    )
