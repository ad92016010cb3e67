"""The backend on torch's own operators, fast on a CPU and correct on every device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.layouts import KV, AttentionOptions, Ragged
from .contract import AttentionBackend, AttentionSpec, empty_lse
from .masking import apply_mask, hidden, restrict, row_blocks, visible
from .paged_kv import PagedSequence, gather, gather_sequence, paged_sequences, rotated_like, sequence_bias


class SdpaBackend(AttentionBackend):
    """torch's scaled_dot_product_attention, and two batched products where it is slow or lacks an option."""

    name = "sdpa"

    def refuses(self, spec: AttentionSpec) -> str | None:
        return None

    def dense(self, q: Tensor, kv: KV, options: AttentionOptions, *, mask: Tensor | None = None) -> Tensor:
        return attend(q, kv, mask, options)[0].transpose(1, 2)

    def paged(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool = False) -> Any:
        out, lse = paged_attention(q, kv, ragged, options, return_lse=return_lse)
        return (out, lse) if return_lse else out


# -- dense attention: torch's fused kernel, or two products where that is slow -------------------------

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


# -- two batched products ------------------------------------------------------------------------------


def grouped_attention(
    q: Tensor, kv: KV, mask: Tensor | None, options: AttentionOptions, *, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """q [B, Hq, Q, D] over a dense kv -> [B, Hq, Q, Dv], lse [B, Hq, Q] or None; `mask` stands for causal and window.

    The query heads of a key head are more rows of one product. Scores are float32: rounding them to bfloat16 would
    cost several times the error of the rest. The weights are rounded to v's dtype, as flash kernels do.
    """
    (k, v, *_), sinks = kv, options.sinks
    batch, num_kv_heads, num_keys, value_dim = v.shape
    group_rows = q.shape[1] // num_kv_heads * q.shape[2]
    exact = torch.promote_types(q.dtype, torch.float32)
    rows = (q.to(exact) * options.scale).reshape(batch, num_kv_heads, group_rows, q.shape[3])
    scores = torch.matmul(rows, k.to(exact).transpose(2, 3)).view(*q.shape[:3], num_keys)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    weights, lse = masked_softmax(scores, mask, need_lse=return_lse or sinks is not None)
    if options.dropout > 0:
        weights = F.dropout(weights, options.dropout)
    # torch has no fast float16 product on a CPU
    product = exact if v.dtype == torch.float16 and v.device.type == "cpu" else v.dtype
    out = torch.matmul(weights.to(product).view(batch, num_kv_heads, group_rows, num_keys), v.to(product))
    out = out.view(*q.shape[:3], value_dim)
    if sinks is not None and lse is not None:
        logits = sinks.to(exact).unsqueeze(1)  # [Hq, 1]
        out = out * torch.sigmoid(lse - logits).unsqueeze(-1)
        lse = torch.logaddexp(lse, logits)
    return out.to(q.dtype), lse


def masked_softmax(scores: Tensor, mask: Tensor | None, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return the softmax over the last dimension, zeros where all is hidden, and its log denominator if needed."""
    if mask is not None:
        scores = apply_mask(scores, mask)
    weights = torch.softmax(scores, dim=-1)
    if mask is not None:  # a row without keys is NaN
        weights = weights.masked_fill(hidden(mask), 0.0)
    return weights, torch.logsumexp(scores, dim=-1) if need_lse else None


# -- over a paged cache: similar sequences share one gather, the others run one by one -----------------

MAX_PADDING = 256  # tokens a sequence; with more of them, a call of its own is cheaper
MAX_BYTES = 2**28  # bytes of a gather that sequences share


def paged_attention(
    q: Tensor, pages: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """q [N, Hq, D] over paged K and V -> [N, Hq, Dv], lse [N, Hq] or None."""
    out, q = q.new_zeros(*q.shape[:2], pages.value_dim), rotated_like(q, pages.k)
    lse = empty_lse(q, options.sinks) if return_lse else None
    block_size, block_bytes = pages.k.shape[2], pages.k[:1].nbytes + pages.v[:1].nbytes
    sequences = paged_sequences(ragged, block_size=block_size, window=options.window)
    for batch in batches(sequences, max_blocks=MAX_BYTES // block_bytes, max_padding=MAX_PADDING // block_size):
        rows: Tensor | slice = batch[0].queries
        own, mask = options, None
        if len(batch) > 1:
            rows, kv, mask = padded_together(pages, ragged, batch, options=options, dtype=q.dtype)
            own = options._replace(causal=False, window=None)
        else:
            kv = gather_sequence(pages, ragged, batch[0], q.dtype)
            added = sequence_bias(options.bias, batch[0], block_size)
            mask = None if added is None else added.unsqueeze(0)
        queries = q[rows].view(len(batch), -1, *q.shape[1:]).transpose(1, 2)  # [B, Hq, Q, D]
        part, part_lse = attend(queries, kv, mask, own, return_lse=return_lse)
        out[rows] = part.transpose(1, 2).flatten(0, 1)
        if lse is not None and part_lse is not None:
            lse[rows] = part_lse.transpose(1, 2).flatten(0, 1).float()
    return rotated_like(out, pages.v), lse


def batches(sequences: Iterable[PagedSequence], *, max_blocks: int, max_padding: int) -> Iterator[list[PagedSequence]]:
    """Group sequences with equally many query rows and similar lengths, the longest last.

    max_blocks bounds a batch with its padding, max_padding the blocks of padding per sequence.
    """
    batch: list[PagedSequence] = []
    needed = 0
    for sequence in sorted(sequences, key=lambda s: (s.num_queries, s.num_blocks)):
        count = len(batch) + 1
        padding = count * sequence.num_blocks - (needed + sequence.num_blocks)
        fits = count * sequence.num_blocks <= max_blocks and padding <= count * max_padding
        if batch and not (fits and batch[0].num_queries == sequence.num_queries <= PRODUCT_ROWS):
            yield batch
            batch, needed = [], 0
        batch.append(sequence)
        needed += sequence.num_blocks
    if batch:
        yield batch


def padded_together(
    pages: KV, ragged: Ragged, batch: list[PagedSequence], *, options: AttentionOptions, dtype: torch.dtype
) -> tuple[Tensor, KV, Tensor]:
    """Pad several sequences to the blocks of the last one: query rows [B * Q], keys, and who sees which key."""
    block_table, device = ragged.block_table, ragged.cu_q.device
    assert block_table is not None
    fields = torch.tensor(batch, device=device).unsqueeze(2).unbind(1)  # each [B, 1]
    number, first_query, _, first_block, num_blocks, num_keys = fields
    steps = torch.arange(batch[-1].num_blocks, device=device)
    needed = steps < num_blocks
    blocks = block_table[number, first_block + steps * needed]
    # Padding repeats a full block, for 0 * garbage may be NaN: where there is padding, the longest has a full one.
    kv = gather(pages, torch.where(needed, blocks, blocks[-1, 0]), dtype)
    clear_unused(kv.v.view(*kv.v.shape[:2], len(steps), -1, kv.v.shape[3]), num_blocks - 1, num_keys)
    query = torch.arange(batch[0].num_queries, device=device)
    places, keys = num_keys - len(query) + query, torch.arange(kv.k.shape[2], device=device)
    seen = visible(places, keys, causal=options.causal, window=options.window)
    if not options.causal:  # then padding behind the keys of a sequence is not hidden yet
        seen = seen & (keys < num_keys.unsqueeze(2))
    seen = seen.unsqueeze(1)
    if options.bias is None:
        return (first_query + query).flatten(), kv, seen
    before = first_block * pages.k.shape[2]
    return (first_query + query).flatten(), kv, restrict(options.bias.between(places + before, keys + before), seen)


def clear_unused(values: Tensor, last_block: Tensor, num_keys: Tensor) -> None:
    """Zero the slots of values [B, Hkv, n, block_size, D] behind the last key, which were never written."""
    block_size = values.shape[3]
    sequence = torch.arange(len(values), device=values.device)
    last = values[sequence, :, last_block.squeeze(1)]  # [B, Hkv, block_size, D]
    unused = torch.arange(block_size, device=values.device) >= num_keys - last_block * block_size  # [B, block_size]
    values[sequence, :, last_block.squeeze(1)] = last.masked_fill(unused[:, None, :, None], 0.0)
