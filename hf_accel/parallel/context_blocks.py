"""The blocks of the pages that a rank holds, and the part of a pass that it writes and reads in them.

Block b of a pool is block b // size of rank b % size. All ranks keep the same records of all blocks, so each knows
where every token is, and neighbouring blocks of a sequence usually belong to different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cache.group import GroupStep
from ..cache.pool import BlockTable
from ..kernels.layouts import Ragged
from ..tensors import integers


@dataclass(frozen=True)
class OwnKeys:
    """The keys of one sequence in a rank's own blocks, which queries `rows` of a pass may see.

    first: the position of the first of these queries; the others follow it. blocks: [n] int64, numbers among the
    rank's own, in the order of their keys. positions: [M] int64, of the keys in these blocks; the slots behind them
    hold none.
    """

    rows: slice
    first: int
    blocks: Tensor
    positions: Tensor


@dataclass(frozen=True)
class OwnPart:
    """The blocks that attention over a rank's own keys reads in a pass of N queries.

    decoding: the sequences with one query that sees every key, one after the other; kernels read their blocks in
    place. None if there are none. decoding_rows: [B] int64, their queries; None if these are all N. others: the other
    sequences that have keys here.
    """

    decoding: Ragged | None
    decoding_rows: Tensor | None
    others: tuple[OwnKeys, ...]

    def to(self, device: torch.device) -> OwnPart:
        """Return a copy whose tensors are on `device`."""
        if device.type == "cpu":
            return self
        decoding, rows = self.decoding, self.decoding_rows
        if decoding is not None and decoding.block_table is not None:
            cu_q, kv_len, table = (x.to(device) for x in (decoding.cu_q, decoding.kv_len, decoding.block_table))
            decoding = decoding._replace(cu_q=cu_q, kv_len=kv_len, block_table=table)
        others = (replace(x, blocks=x.blocks.to(device), positions=x.positions.to(device)) for x in self.others)
        return OwnPart(decoding, None if rows is None else rows.to(device), tuple(others))


def num_own(num_blocks: int, size: int) -> int:
    """Return the most blocks of `num_blocks` that a rank holds.

    It is the same on all ranks, so that pages have one size.
    """
    return -(-num_blocks // size)


def own_slots(slots: Tensor, *, block_size: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Find those of the slots [W] int64 that are in this rank's blocks.

    Returns their indices [V] and their slots there [V].
    """
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    index = (blocks % size == rank).nonzero().squeeze(1)
    blocks, slots = blocks[index], slots[index]
    return index, torch.div(blocks, size, rounding_mode="floor") * block_size + slots % block_size


def own_step(
    step: GroupStep, tables: Sequence[BlockTable], spans: Sequence[range], *, window: int | None, rank: int, size: int
) -> GroupStep:
    """Narrow a GroupStep over all blocks to the blocks of one rank.

    tables, spans: the block table of each sequence, and the positions of its queries. The result's `ragged` still
    describes all blocks.
    """
    if not tables:
        return step
    block_size = tables[0].pool.block_size
    index, slots = own_slots(step.slots, block_size=block_size, rank=rank, size=size)
    written = index if step.written is None else step.written[index]
    row = 0
    decoding: list[OwnKeys] = []
    others: list[OwnKeys] = []
    for table, span in zip(tables, spans, strict=True):
        if span:
            keys = _own_keys(table, span, row, window=window, rank=rank, size=size)
            (decoding if len(span) == 1 and window is None else others).append(keys)
        row += len(span)
    part = OwnPart(
        _ragged(decoding) if decoding else None,
        None if len(decoding) == row else integers([keys.rows.start for keys in decoding]),
        tuple(keys for keys in others if len(keys.positions)),
    )
    return replace(step, slots=slots, written=written, own=part.to(slots.device))


def _own_keys(table: BlockTable, span: range, row: int, *, window: int | None, rank: int, size: int) -> OwnKeys:
    block_size, dropped = table.pool.block_size, table.num_dropped_blocks
    oldest = 0 if window is None else max(0, span.start - window + 1)
    numbers = torch.arange(max(dropped, oldest // block_size), -(-span.stop // block_size))  # in the sequence
    blocks = integers(table.blocks)[numbers - dropped]
    is_own = blocks % size == rank
    positions = (numbers[is_own].unsqueeze(1) * block_size + torch.arange(block_size)).flatten()
    # Only the last block of a sequence is partly filled.
    return OwnKeys(slice(row, row + len(span)), span.start, blocks[is_own] // size, positions[positions < span.stop])


def _ragged(decoding: Sequence[OwnKeys]) -> Ragged:
    lengths = [len(keys.positions) for keys in decoding]
    table = torch.zeros(len(decoding), max(len(keys.blocks) for keys in decoding), dtype=torch.int32)
    for number, keys in enumerate(decoding):
        table[number, : len(keys.blocks)] = keys.blocks
    return Ragged(
        integers(range(len(decoding) + 1), dtype=torch.int32),
        kv_len=integers(lengths, dtype=torch.int32),
        max_q=1,
        max_kv=max(lengths),
        block_table=table,
    )
