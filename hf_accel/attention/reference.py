"""Attention by its definition in plain torch: the oracle of every backend, and the last resort."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import AttentionBackend, AttentionSpec, empty_lse
from .blocks import row_blocks
from .masking import apply_mask
from .pages import Pages, paged_sequences

ROWS_AT_A_TIME = 256  # bounds the scores of a long prompt


class ReferenceBackend(AttentionBackend):
    """Float32 throughout (float64 for float64 operands), one sequence after the other; refuses nothing."""

    name = "reference"

    def refuses(self, spec: AttentionSpec) -> str | None:
        return None

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        out, _ = attend(
            q,
            k,
            v,
            mask=mask,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
        )
        return out.transpose(1, 2).to(q.dtype)

    def paged(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        k_scales: Tensor | None,
        v_scales: Tensor | None,
        block_table: Tensor,
        cu_q: Tensor,
        kv_len: Tensor,
        max_q: int,
        max_kv: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        out = q.new_zeros(*q.shape[:2], v_pages.shape[3])
        lse = empty_lse(q, sinks)
        pages = Pages(k_pages, v_pages, k_scales, v_scales)
        for sequence in paged_sequences(cu_q, kv_len, block_size=pages.block_size, window=window):
            blocks = block_table[sequence.row, sequence.blocks].unsqueeze(0)
            k, v = (x[:, :, : sequence.num_keys] for x in pages.gather(blocks, dtype=torch.float32))
            rows = q[sequence.queries].transpose(0, 1).unsqueeze(0)  # [1, Hq, Q, D]
            part, part_lse = attend(
                rows, k, v, mask=None, causal=True, window=window, scale=scale, softcap=softcap, sinks=sinks
            )
            out[sequence.queries] = part[0].transpose(0, 1).to(q.dtype)
            lse[sequence.queries] = part_lse[0].transpose(0, 1).float()
        return (out, lse) if return_lse else out


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
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, Q, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] -> [B, Hq, Q, Dv] and lse [B, Hq, Q], both float32."""
    parts = [
        attend_rows(*block, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
        for block in row_blocks(q, k, v, mask, size=ROWS_AT_A_TIME, causal=causal, window=window)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The definition: weights = exp(scores - lse)."""
    exact = torch.promote_types(q.dtype, torch.float32)
    groups = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1])  # B, Hkv, G
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q.to(exact).reshape(*groups, *q.shape[2:]), k.to(exact)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.flatten(1, 2)  # [B, Hq, Q, T]
    if mask is not None:
        scores = apply_mask(scores, mask)
    lse = torch.logsumexp(scores, dim=-1)  # [B, Hq, Q]
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(exact).unsqueeze(1))
    # A row without keys has lse = -inf; a finite stand-in makes its weights 0 instead of NaN.
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(exact).min).unsqueeze(-1))
    if dropout > 0:
        weights = F.dropout(weights, dropout)
    out = torch.einsum("bhgqk,bhkd->bhgqd", weights.view(*groups, *scores.shape[2:]), v.to(exact))
    return out.flatten(1, 2), lse
