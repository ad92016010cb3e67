"""Sequences that grow, fork, go back and leave each at its own pace, over shared pages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import OutOfBlocksError
from .group import PageGroup
from .step import GroupStep, Step, offsets
from .table import BlockTable


@dataclass
class Row:
    """One sequence: a block table per group, and its token ids where they are known (for prefix sharing)."""

    tables: list[BlockTable]
    token_ids: list[int] | None = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.tables[0].num_tokens

    def fork(self) -> Row:
        other = Row([], None if self.token_ids is None else list(self.token_ids))
        try:
            for table in self.tables:
                other.tables.append(table.fork())
        except BaseException:
            other.release()
            raise
        return other

    def truncate(self, num_tokens: int) -> None:
        """Go back to the first `num_tokens` tokens."""
        for table in self.tables:
            if num_tokens:
                table.truncate(min(num_tokens, table.num_tokens))
            else:
                table.release()
        if self.token_ids is not None:
            del self.token_ids[num_tokens:]

    def release(self) -> None:
        for table in self.tables:
            table.release()


@dataclass(frozen=True)
class Span:
    """Tokens start..start+count-1 of a row are computed in a pass; the row has slots for them already."""

    row: Row
    start: int
    count: int


def _rolls(group: PageGroup) -> bool:
    """Whether a row of any length fits, because a new block never comes before the window has left an old one."""
    return group.window is not None and group.pool.num_blocks > -(-(group.window - 1) // group.pool.block_size)


class Pages:
    """What a scheduler asks of the groups of pages: room, known beginnings, going back."""

    def __init__(self, groups: list[PageGroup]) -> None:
        self.groups = groups
        self.shares_prefixes = all(group.index is not None for group in groups)

    @property
    def block_size(self) -> int:
        return self.groups[0].pool.block_size

    @property
    def capacity(self) -> int | None:
        """Tokens that one sequence alone can have; None if nothing bounds them."""
        bounded = [g.pool.num_blocks * self.block_size for g in self.groups if not g.pool.growable and not _rolls(g)]
        return min(bounded, default=None)

    # -- rows ------------------------------------------------------------------------------------------

    def open(self, token_ids: Sequence[int]) -> Row:
        """A row that begins with what is known of these tokens; at least the last is left to compute.

        Only whole blocks are taken. A part of one would be copied before it is written to, and blocks that are
        published by the pass that computes them hold nothing yet.
        """
        row = Row([BlockTable(group.pool) for group in self.groups], None)
        if not self.shares_prefixes:
            return row
        matches = [group.index.match(token_ids) for group in self.groups if group.index is not None]
        known = max(0, min(min(map(len, matches)), (len(token_ids) - 1) // self.block_size))
        try:
            for table, blocks in zip(row.tables, matches, strict=True):
                table.adopt(blocks[:known], known * self.block_size)
        except BaseException:
            row.release()
            raise
        return row

    def free_blocks(self) -> list[int]:
        """For each group, the blocks that can be given out; sys.maxsize where the pool grows."""
        return [sys.maxsize if group.pool.growable else group.pool.num_free for group in self.groups]

    def blocks_for(self, row: Row, count: int) -> list[int]:
        """For each group, the blocks that `count` more tokens of a row take; at most those in a sliding window."""
        return [
            table.blocks_needed(count if group.window is None else min(count, group.window))
            for group, table in zip(self.groups, row.tables, strict=True)
        ]

    def slide(self, row: Row, start: int) -> None:
        """Let go of what lies behind the windows of the token `start`; the row cannot go back further than to it."""
        for group, table in zip(self.groups, row.tables, strict=True):
            if group.window is not None:
                table.drop_before(start - group.window + 1)

    def room(self, row: Row, most: int, *, start: int | None = None) -> int:
        """How many tokens can be appended, at most `most`. start: as for `append`."""
        self.slide(row, row.num_tokens if start is None else start)
        for group, table in zip(self.groups, row.tables, strict=True):
            if not group.pool.growable:
                most = min(most, table.slots_with(group.pool.num_free))
        return most

    def can_append(self, row: Row, count: int, *, start: int | None = None) -> bool:
        return self.room(row, count, start=start) == count

    def append(self, row: Row, count: int, *, start: int | None = None) -> None:
        """Slots for `count` more tokens. Raises as PageGroup.append does, with the row's tokens as they were.

        start: the first token that the coming pass computes, if the row has slots for it already. The row slides
        to it when a new block is needed, and not when tokens are taken back, so that it can go back.
        """
        for table in row.tables:
            if not table.has_slots(count):
                break
        else:
            for table in row.tables:
                table.num_tokens += count
            return
        if not self.can_append(row, count, start=start):
            for group, table in zip(self.groups, row.tables, strict=True):
                group.pool.require(table.blocks_needed(count))
            raise OutOfBlocksError(f"no blocks for {count} more tokens")
        longer: list[BlockTable] = []
        try:
            for group, table in zip(self.groups, row.tables, strict=True):
                group.append(table, count)
                longer.append(table)
        except BaseException:
            for table in longer:
                table.truncate(table.num_tokens - count)
            raise

    def publish(self, row: Row, token_ids: Sequence[int]) -> None:
        """Let others find the full blocks of `token_ids`, which the row begins with and will not take back."""
        if self.shares_prefixes:
            for group, table in zip(self.groups, row.tables, strict=True):
                if group.index is not None:
                    group.index.insert(token_ids, table.blocks)

    def use_salt(self, salt: bytes) -> None:
        """What K and V depend on besides the tokens: blocks of another salt are not found any more."""
        for group in self.groups:
            if group.index is not None:
                group.index.use_salt(salt)

    def forget(self) -> None:
        """Let nobody find any block: after a pass that failed they may hold anything."""
        for group in self.groups:
            if group.index is not None:
                group.index.clear()

    # -- a pass ----------------------------------------------------------------------------------------

    def step(self, spans: Sequence[Span], device: torch.device) -> Step:
        """What a forward pass over the tokens of these spans, end to end in one row, reads and writes."""
        counts = [span.count for span in spans]
        return Step(
            groups=[group_step(group, index, spans, device) for index, group in enumerate(self.groups)],
            cu_q=offsets(counts, device),
            max_q=max(counts, default=0),
            num_columns=sum(counts),
            rows=None,
            fresh=False,
            contiguous=[True] * len(self.groups),
        )


def num_live_tokens(rows: Iterable[Row], index: int) -> int:
    """Tokens that rows hold in the pages of a group, those of a shared block counted once."""
    tokens_in_block: dict[int, int] = {}
    for row in rows:
        table = row.tables[index]
        size = table.pool.block_size
        for number, block in enumerate(table.blocks):
            filled = min(size, table.num_held_tokens - number * size)
            tokens_in_block[block] = max(filled, tokens_in_block.get(block, 0))
    return sum(tokens_in_block.values())


def group_step(group: PageGroup, index: int, spans: Sequence[Span], device: torch.device) -> GroupStep:
    """The part of a Step that layers of one group see. A row may have slots beyond its span: nobody reads them."""
    size = group.pool.block_size
    tables = [span.row.tables[index] for span in spans]
    slots: list[int] = []
    for span, table in zip(spans, tables, strict=True):
        slots += table.slots(span.start, span.start + span.count)
    held = [
        span.start + span.count - table.num_dropped_blocks * size for span, table in zip(spans, tables, strict=True)
    ]
    return GroupStep(
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        written=None,
        block_table=group.table_tensor(tables, device),
        kv_len=torch.tensor(held, dtype=torch.int32, device=device),
        max_kv=max(held, default=0),
    )
