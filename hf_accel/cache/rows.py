"""Sequences that grow, fork, go back and leave each at its own pace, over shared pages."""

from __future__ import annotations

from collections.abc import Sequence
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
        return Row([t.fork() for t in self.tables], None if self.token_ids is None else list(self.token_ids))

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


class Pages:
    """What a scheduler asks of the groups of pages: room, known beginnings, going back."""

    def __init__(self, groups: list[PageGroup]) -> None:
        self.groups = groups

    @property
    def block_size(self) -> int:
        return self.groups[0].pool.block_size

    @property
    def capacity(self) -> int | None:
        """Tokens that one sequence alone can have; None if the pools grow."""
        pools = [group.pool for group in self.groups]
        if all(pool.growable for pool in pools):
            return None
        return min(pool.num_blocks * pool.block_size for pool in pools if not pool.growable)

    # -- rows ------------------------------------------------------------------------------------------

    def open(self, token_ids: Sequence[int]) -> Row:
        """A row that begins with what is known of these tokens; at least the last is left to compute."""
        row = Row([BlockTable(group.pool) for group in self.groups], None)
        if any(group.index is None for group in self.groups):
            return row
        matches = [group.index.match(token_ids) for group in self.groups if group.index is not None]
        known = min(min(map(len, matches)) * self.block_size, len(token_ids) - 1)
        if known > 0:
            for table, blocks in zip(row.tables, matches, strict=True):
                table.adopt(blocks[: -(-known // self.block_size)], known)
        return row

    def can_append(self, row: Row, count: int) -> bool:
        tables = zip(self.groups, row.tables, strict=True)
        return all(group.pool.can_allocate(table.blocks_needed(count)) for group, table in tables)

    def append(self, row: Row, count: int) -> None:
        """Slots for `count` more tokens. Raises OutOfBlocksError, with the row as it was."""
        if not self.can_append(row, count):
            for group, table in zip(self.groups, row.tables, strict=True):
                group.pool.require(table.blocks_needed(count))
            raise OutOfBlocksError(f"no blocks for {count} more tokens")
        for group, table in zip(self.groups, row.tables, strict=True):
            if group.window is not None:  # here, and not earlier, so that a row can go back
                table.drop_before(table.num_tokens - group.window + 1)
            group.copy(table.append(count))

    def publish(self, row: Row, token_ids: Sequence[int]) -> None:
        """Let others find the full blocks of `token_ids`, which the row begins with and will not take back."""
        for group, table in zip(self.groups, row.tables, strict=True):
            if group.index is not None:
                group.index.insert(token_ids, table.blocks)

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
