"""Attention by its definition in plain torch: the oracle of every backend, and the last resort."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.layouts import KV, AttentionOptions, Ragged
from .contract import AttentionBackend, AttentionSpec, empty_lse
from .masking import apply_mask, row_blocks
from .paged_kv import gather_sequence, paged_sequences, rotated_like, sequence_bias

ROWS_AT_A_TIME = 256  # bounds the scores of a long prompt


class ReferenceBackend(AttentionBackend):
    """Float32 throughout (float64 for float64 operands), one sequence after the other; refuses nothing."""

    name = "reference"

    def refuses(self, spec: AttentionSpec) -> str | None:
        return None

    def dense(self, q: Tensor, kv: KV, options: AttentionOptions, *, mask: Tensor | None = None) -> Tensor:
        return attend(q, kv, mask, options)[0].transpose(1, 2).to(q.dtype)

    def paged(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool = False) -> Any:
        out = q.new_zeros(*q.shape[:2], kv.value_dim)
        exact = rotated_like(q.to(torch.promote_types(q.dtype, torch.float32)), kv.k)
        lse = empty_lse(q, options.sinks)
        for sequence in paged_sequences(ragged, block_size=kv.k.shape[2], window=options.window):
            used = gather_sequence(kv, ragged, sequence, torch.float32)
            rows = exact[sequence.queries].transpose(0, 1).unsqueeze(0)  # [1, Hq, Q, D]
            part, part_lse = attend(rows, used, sequence_bias(options.bias, sequence, kv.k.shape[2]), options)
            out[sequence.queries] = rotated_like(part[0].transpose(0, 1), kv.v).to(q.dtype)
            lse[sequence.queries] = part_lse[0].transpose(0, 1).float()
        return (out, lse) if return_lse else out


def attend(q: Tensor, kv: KV, mask: Tensor | None, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """q [B, Hq, Q, D] over a dense kv -> [B, Hq, Q, Dv] and lse [B, Hq, Q], both float32."""
    blocks = row_blocks(q, kv, mask, options, size=ROWS_AT_A_TIME)
    outs, lses = zip(*(attend_rows(*block, options) for block in blocks), strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def attend_rows(q: Tensor, kv: KV, mask: Tensor | None, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Compute the definition: weights = exp(scores - lse). The mask replaces causal and window."""
    exact = torch.promote_types(q.dtype, torch.float32)
    groups = (q.shape[0], kv.k.shape[1], q.shape[1] // kv.k.shape[1])  # B, Hkv, G
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q.to(exact).reshape(*groups, *q.shape[2:]), kv.k.to(exact))
    scores = scores * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.flatten(1, 2)  # [B, Hq, Q, T]
    if mask is not None:
        scores = apply_mask(scores, mask)
    lse = torch.logsumexp(scores, dim=-1)  # [B, Hq, Q]
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks.to(exact).unsqueeze(1))
    # A row without keys has lse = -inf; a finite stand-in makes its weights 0 instead of NaN.
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(exact).min).unsqueeze(-1))
    if options.dropout > 0:
        weights = F.dropout(weights, options.dropout)
    out = torch.einsum("bhgqk,bhkd->bhgqd", weights.view(*groups, *scores.shape[2:]), kv.v.to(exact))
    return out.flatten(1, 2), lse
