"""Attention over a rank's own blocks, and the merging of the ranks' results by the log-sum-exp of their scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention.contract import AttentionBackend, empty_lse
from ..attention.masking import visible
from ..attention.paged_kv import gather, rotated_like_pages
from ..attention.sdpa.grouped import grouped_attention
from ..kernels.layouts import KV, AttentionOptions
from .context_blocks import OwnKeys, OwnPart

MOST_BYTES = 2**26  # bytes of K and V that are gathered at a time
MOST_SCORES = 2**24  # bounds the float32 scores of a product: 64 MB


def merge_ranks(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from parts over disjoint ones: outs [N, H, Dv], lses [N, H] -> out, lse float32.

    Each part has the weight exp(lse), as in Flash-Decoding (Dao 2023); one with lse -inf has seen no key. Sums are in
    float32, in the order given, so that all ranks that merge the same parts get the same bits.
    """
    stacked = torch.stack([lse.float() for lse in lses])
    total = stacked.logsumexp(0)
    weights = (stacked - total.masked_fill(total.isneginf(), 0.0)).exp()
    merged = torch.zeros_like(outs[0], dtype=torch.float32)
    for out, weight in zip(outs, weights, strict=True):
        merged += out.float() * weight.unsqueeze(-1)
    return merged.to(outs[0].dtype), total


def attend_own(
    backend: AttentionBackend, q: Tensor, pages: KV, *, part: OwnPart, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """q [N, Hq, D] over the keys of a pass in this rank's pages -> [N, Hq, Dv], lse [N, Hq] float32.

    A query that sees no key here gets zeros, and -inf or its sink. See AttentionBackend.paged.
    """
    if part.decoding is not None and part.decoding_rows is None:
        out, lse = backend.paged(q, pages, part.decoding, options, return_lse=True)
        return out, lse
    out, lse = q.new_zeros(*q.shape[:2], pages.value_dim), empty_lse(q, options.sinks)
    if part.decoding is not None:
        rows = part.decoding_rows
        out[rows], lse[rows] = backend.paged(q[rows], pages, part.decoding, options, return_lse=True)
    for keys in part.others:
        out[keys.rows], lse[keys.rows] = _attend_sequence(q[keys.rows], pages, keys, options)
    return out, lse


def _attend_sequence(q: Tensor, pages: KV, keys: OwnKeys, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """q [Q, Hq, D] over the keys of one sequence, whose positions say who sees which. K and V are gathered."""
    block_size, block_bytes = pages.k.shape[2], pages.k[:1].nbytes + pages.v[:1].nbytes
    step = max(1, MOST_BYTES // block_bytes)
    queries = rotated_like_pages(q, pages).transpose(0, 1).unsqueeze(0)  # [1, Hq, Q, D]
    parts = []
    for start in range(0, len(keys.blocks), step):
        positions = keys.positions[start * block_size : (start + step) * block_size]
        k, v, *_ = gather(pages, keys.blocks[None, start : start + step], q.dtype)
        used = KV(k[:, :, : len(positions)], v[:, :, : len(positions)])
        # One part only counts the sinks.
        own = options if start == 0 else options._replace(sinks=None)
        parts.append(_attend_gathered(queries, used, own, first=keys.first, positions=positions))
    out, lse = parts[0] if len(parts) == 1 else merge_ranks(*zip(*parts, strict=True))
    return rotated_like_pages(out, pages), lse


def _attend_gathered(
    queries: Tensor, kv: KV, options: AttentionOptions, *, first: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """queries [1, Hq, Q, D] over kv [1, Hkv, M, ..] -> [Q, Hq, Dv], lse [Q, Hq] float32."""
    num_heads, num_queries = queries.shape[1:3]
    size = max(1, MOST_SCORES // max(1, num_heads * len(positions)))
    outs, lses = [], []
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        at = torch.arange(first + start, first + stop, device=positions.device)
        seen = visible(at, positions, causal=True, window=options.window)
        out, lse = grouped_attention(queries[:, :, start:stop], kv, seen, options, return_lse=True)
        assert lse is not None
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1).float())
    return torch.cat(outs), torch.cat(lses)
