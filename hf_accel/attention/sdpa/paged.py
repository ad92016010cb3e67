"""Attention over a paged cache: similar sequences share one gather, the others run one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..base import empty_lse
from ..masking import visible
from ..pages import PagedSequence, Pages, paged_sequences
from .dense import FEW_ROWS, attend

MAX_PADDING = 256  # tokens a sequence; with more of them, a call of its own is cheaper
MAX_BYTES = 2**28  # of a gather that sequences share


def paged_attention(
    q: Tensor,
    pages: Pages,
    block_table: Tensor,
    cu_q: Tensor,
    kv_len: Tensor,
    *,
    window: int | None,
    sinks: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """[N, Hq, D] -> [N, Hq, Dv], lse [N, Hq] or None; options are those of `attend`."""
    out = q.new_zeros(*q.shape[:2], pages.values.shape[3])
    lse = empty_lse(q, sinks) if return_lse else None
    sequences = paged_sequences(cu_q, kv_len, block_size=pages.block_size, window=window)
    limits = {"max_blocks": MAX_BYTES // pages.block_bytes, "max_padding": MAX_PADDING // pages.block_size}
    for batch in batches(sequences, **limits):
        attend_batch = together if len(batch) > 1 else alone
        rows, part, part_lse = attend_batch(
            q, pages, block_table, batch, window=window, sinks=sinks, return_lse=return_lse, **options
        )
        out[rows] = part.transpose(1, 2).flatten(0, 1)
        if lse is not None and part_lse is not None:
            lse[rows] = part_lse.transpose(1, 2).flatten(0, 1).float()
    return out, lse


def batches(sequences: Iterable[PagedSequence], *, max_blocks: int, max_padding: int) -> Iterator[list[PagedSequence]]:
    """Sequences with equally many query rows and similar lengths, the longest last.

    max_blocks bounds a batch with its padding, max_padding the blocks of padding per sequence.
    """
    batch: list[PagedSequence] = []
    needed = 0
    for sequence in sorted(sequences, key=lambda s: (s.num_queries, s.num_blocks)):
        count = len(batch) + 1
        padding = count * sequence.num_blocks - (needed + sequence.num_blocks)
        fits = count * sequence.num_blocks <= max_blocks and padding <= count * max_padding
        if batch and not (fits and batch[0].num_queries == sequence.num_queries <= FEW_ROWS):
            yield batch
            batch, needed = [], 0
        batch.append(sequence)
        needed += sequence.num_blocks
    if batch:
        yield batch


def alone(
    q: Tensor, pages: Pages, block_table: Tensor, batch: list[PagedSequence], **options: Any
) -> tuple[slice, Tensor, Tensor | None]:
    """The one sequence of `batch`: its query rows, their output [1, Hq, Q, Dv] and lse."""
    [sequence] = batch
    k, v = pages.gather(block_table[sequence.row, sequence.blocks].unsqueeze(0), dtype=q.dtype)
    rows = q[sequence.queries].transpose(0, 1).unsqueeze(0)  # [1, Hq, Q, D]
    used = slice(sequence.num_keys)
    return sequence.queries, *attend(rows, k[:, :, used], v[:, :, used], mask=None, causal=True, **options)


def together(
    q: Tensor, pages: Pages, block_table: Tensor, batch: list[PagedSequence], *, window: int | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Several sequences padded to the blocks of the last one: query rows, output [B, Hq, Q, Dv] and lse."""
    fields = torch.tensor(batch, device=q.device).unsqueeze(2).unbind(1)  # each [B, 1]
    row, first_query, _, first_block, num_blocks, num_keys = fields
    steps = torch.arange(batch[-1].num_blocks, device=q.device)
    needed = steps < num_blocks
    blocks = block_table[row, first_block + steps * needed]
    # Padding repeats a full block, for 0 * garbage may be NaN: where there is padding, the longest has a full one.
    k, v = pages.gather(torch.where(needed, blocks, blocks[-1, 0]), dtype=q.dtype)
    clear_unused(v.view(*v.shape[:2], len(steps), pages.block_size, v.shape[3]), num_blocks - 1, num_keys)
    query = torch.arange(batch[0].num_queries, device=q.device)
    seen = visible(
        num_keys - len(query) + query, torch.arange(k.shape[2], device=q.device), causal=True, window=window
    )
    rows = first_query + query  # [B, Q]
    out, lse = attend(q[rows].transpose(1, 2), k, v, mask=seen.unsqueeze(1), causal=False, window=None, **options)
    return rows.flatten(), out, lse


def clear_unused(values: Tensor, last_block: Tensor, num_keys: Tensor) -> None:
    """Zero the slots of values [B, Hkv, n, block_size, D] behind the last key, which were never written."""
    block_size = values.shape[3]
    sequence = torch.arange(len(values), device=values.device)
    last = values[sequence, :, last_block.squeeze(1)]  # [B, Hkv, block_size, D]
    unused = torch.arange(block_size, device=values.device) >= num_keys - last_block * block_size  # [B, block_size]
    values[sequence, :, last_block.squeeze(1)] = last.masked_fill(unused[:, None, :, None], 0.0)
