"""Attention over a paged cache: similar sequences share one gather, the others run one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ...kernels.layouts import KV, AttentionOptions, Ragged
from ..contract import empty_lse
from ..masking import visible
from ..paged_kv import PagedSequence, gather, gather_sequence, paged_sequences, rotated_like_pages
from .dense import PRODUCT_ROWS, attend

MAX_PADDING = 256  # tokens a sequence; with more of them, a call of its own is cheaper
MAX_BYTES = 2**28  # bytes of a gather that sequences share


def paged_attention(
    q: Tensor, pages: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """q [N, Hq, D] over paged K and V -> [N, Hq, Dv], lse [N, Hq] or None."""
    out, q = q.new_zeros(*q.shape[:2], pages.value_dim), rotated_like_pages(q, pages)
    lse = empty_lse(q, options.sinks) if return_lse else None
    block_size, block_bytes = pages.k.shape[2], pages.k[:1].nbytes + pages.v[:1].nbytes
    sequences = paged_sequences(ragged, block_size=block_size, window=options.window)
    for batch in batches(sequences, max_blocks=MAX_BYTES // block_bytes, max_padding=MAX_PADDING // block_size):
        rows: Tensor | slice = batch[0].queries
        mask = None
        if len(batch) > 1:
            rows, kv, mask = padded_together(pages, ragged, batch, window=options.window, dtype=q.dtype)
        else:
            kv = gather_sequence(pages, ragged, batch[0], q.dtype)
        own = options if mask is None else options._replace(causal=False, window=None)
        queries = q[rows].view(len(batch), -1, *q.shape[1:]).transpose(1, 2)  # [B, Hq, Q, D]
        part, part_lse = attend(queries, kv, mask, own, return_lse=return_lse)
        out[rows] = part.transpose(1, 2).flatten(0, 1)
        if lse is not None and part_lse is not None:
            lse[rows] = part_lse.transpose(1, 2).flatten(0, 1).float()
    return rotated_like_pages(out, pages), lse


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
    pages: KV, ragged: Ragged, batch: list[PagedSequence], *, window: int | None, dtype: torch.dtype
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
    seen = visible(
        num_keys - len(query) + query, torch.arange(kv.k.shape[2], device=device), causal=True, window=window
    )
    return (first_query + query).flatten(), kv, seen.unsqueeze(1)


def clear_unused(values: Tensor, last_block: Tensor, num_keys: Tensor) -> None:
    """Zero the slots of values [B, Hkv, n, block_size, D] behind the last key, which were never written."""
    block_size = values.shape[3]
    sequence = torch.arange(len(values), device=values.device)
    last = values[sequence, :, last_block.squeeze(1)]  # [B, Hkv, block_size, D]
    unused = torch.arange(block_size, device=values.device) >= num_keys - last_block * block_size  # [B, block_size]
    values[sequence, :, last_block.squeeze(1)] = last.masked_fill(unused[:, None, :, None], 0.0)
