"""Sequences that grow, fork, go back and leave each at its own pace, over shared pages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..layouts import Ragged
from .group import GroupStep, PageGroup, Step, offsets
from .table import BlockTable


@dataclass
class CachedSequence:
    """One sequence: a block table per group.

    epoch: that of the prefix index when the sequence began; its blocks are published in no other. None: its K and V
    do not follow from its token ids, and nobody may find them. token_ids: for those who keep them nowhere else.
    """

    tables: list[BlockTable]
    epoch: int | None
    token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.tables[0].num_tokens

    def fork(self) -> CachedSequence:
        other = CachedSequence([], self.epoch, list(self.token_ids))
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
        del self.token_ids[num_tokens:]

    def release(self) -> None:
        for table in self.tables:
            table.release()


@dataclass(frozen=True)
class TokenRange:
    """Tokens start..start+count-1 of a sequence are computed in a pass; the sequence has slots for them already.

    stored: the pass writes those from this number on, since the sequence shares the blocks of those before; 0: all.
    """

    sequence: CachedSequence
    start: int
    count: int
    stored: int = 0

    @property
    def num_written(self) -> int:
        return self.start + self.count - (self.stored or self.start)


def _rolls(group: PageGroup) -> bool:
    """Whether any length fits, because a new block never comes before the window has left an old one."""
    return group.window is not None and group.pool.num_blocks > -(-(group.window - 1) // group.pool.block_size)


class Pages:
    """The one bookkeeper of the groups of pages: room, windows, known beginnings, and what a pass reads and writes."""

    def __init__(self, groups: list[PageGroup]) -> None:
        self.groups = groups
        # Blocks behind a window are gone when the prompt comes again, so that such a model shares none.
        self.index = groups[0].index if len(groups) == 1 else None
        self.epoch = 0 if self.index is None else self.index.epoch

    @property
    def block_size(self) -> int:
        return self.groups[0].pool.block_size

    @property
    def capacity(self) -> int | None:
        """Tokens that one sequence alone can have; None if nothing bounds them."""
        bounded = [g.pool.num_blocks * self.block_size for g in self.groups if not g.pool.growable and not _rolls(g)]
        return min(bounded, default=None)

    # -- known beginnings ------------------------------------------------------------------------------

    def use_salt(self, salt: bytes) -> None:
        """What K and V depend on besides the tokens: blocks of another salt are not found any more."""
        if self.index is not None:
            self.index.use_salt(salt)
            self.epoch = self.index.epoch

    def forget(self) -> None:
        """Let nobody find any block: after a pass that failed they may hold anything."""
        if self.index is not None:
            self.index.clear()
            self.epoch = self.index.epoch

    def known(self, token_ids: Sequence[int]) -> list[int]:
        """The blocks of the longest known beginning of these tokens, for `begin`."""
        if self.index is None or self.index.epoch != self.epoch:  # others over these pages may have taken another salt
            return []
        return self.index.match(token_ids)

    def begin(self, blocks: Sequence[int] = (), num_tokens: int = 0) -> CachedSequence:
        """A sequence of the first `num_tokens` tokens that stand in `blocks`."""
        sequence = CachedSequence([BlockTable(group.pool) for group in self.groups], self.epoch)
        if num_tokens:
            sequence.tables[0].adopt(blocks[: -(-num_tokens // self.block_size)], num_tokens)
        return sequence

    def open(self, token_ids: Sequence[int]) -> CachedSequence:
        """A sequence that begins with what is known of these tokens; at least the last is left to compute.

        Only whole blocks are taken. A part of one would be copied before it is written to, and blocks that are
        published by the pass that computes them hold nothing yet.
        """
        blocks = self.known(token_ids)
        return self.begin(blocks, max(0, min(len(blocks), (len(token_ids) - 1) // self.block_size)) * self.block_size)

    def publish(self, sequence: CachedSequence, token_ids: Sequence[int]) -> list[int]:
        """Let others find the full blocks of `token_ids`, which the sequence begins with and will not take back.

        Returns those that nobody could find before.
        """
        if self.index is None or sequence.epoch != self.index.epoch:
            return []
        return self.index.insert(token_ids, sequence.tables[0].blocks)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Let nobody find these blocks, which were published and will not be written; a sequence still holds them."""
        if self.index is not None:
            for block in blocks:
                if block in self.index:
                    self.index.forget(block)

    # -- windows ---------------------------------------------------------------------------------------

    def slide(self, sequence: CachedSequence, start: int) -> None:
        """Let go of what lies behind the windows of token `start`; the sequence goes back no further than to it."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if group.window is not None:
                table.drop_before(start - group.window + 1)

    def require_held(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Raise UnsupportedError if a window has let go of what the sequence needs to go back to so many tokens."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            held = table.num_dropped_blocks * self.block_size
            needed = 0 if group.window is None else max(0, num_tokens - group.window + 1)
            if num_tokens and held > needed:
                raise UnsupportedError(
                    f"cannot go back to {num_tokens} tokens: a sliding window of {group.window} needs those from "
                    f"{needed} on, and the cache holds those from {held} on; crop less, or reset() the cache"
                )

    # -- room ------------------------------------------------------------------------------------------

    def free_blocks(self) -> list[int]:
        """For each group, the blocks that can be given out; sys.maxsize where the pool grows."""
        return [sys.maxsize if group.pool.growable else group.pool.num_free for group in self.groups]

    def blocks_for(self, sequence: CachedSequence, count: int) -> list[int]:
        """For each group, the blocks that `count` more tokens take; at most those in a sliding window."""
        return [
            table.blocks_needed(count if group.window is None else min(count, group.window))
            for group, table in zip(self.groups, sequence.tables, strict=True)
        ]

    def room(self, sequence: CachedSequence, most: int, *, start: int | None = None) -> int:
        """How many tokens can be appended, at most `most`. start: as for `append`."""
        self.slide(sequence, sequence.num_tokens if start is None else start)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if not group.pool.growable:
                most = min(most, table.slots_with(group.pool.num_free))
        return most

    def can_append(self, sequence: CachedSequence, count: int, *, start: int | None = None) -> bool:
        return self.room(sequence, count, start=start) == count

    def append(self, sequence: CachedSequence, count: int, *, start: int | None = None) -> None:
        """Slots for `count` more tokens. Raises as PageGroup.append does, with the sequence's tokens as they were.

        start: the first token that the coming pass computes, if the sequence has slots for it already. The sequence
        slides to it when a new block is needed, and not when tokens are taken back, so that it can go back.
        """
        for table in sequence.tables:
            if not table.has_slots(count):
                break
        else:
            for table in sequence.tables:
                table.num_tokens += count
            return
        self.slide(sequence, sequence.num_tokens if start is None else start)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.pool.require(table.blocks_needed(count))
        longer: list[BlockTable] = []
        try:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                group.append(table, count)
                longer.append(table)
        except BaseException:
            for table in longer:
                table.truncate(table.num_tokens - count)
            raise

    # -- a pass ----------------------------------------------------------------------------------------

    def step(self, ranges: Sequence[TokenRange], device: torch.device) -> Step:
        """What a forward pass over the tokens of these ranges, end to end in one row, reads and writes."""
        counts = [each.count for each in ranges]
        cu_q = offsets(counts, device)
        return Step(
            groups=[_group_step(group, index, ranges, cu_q) for index, group in enumerate(self.groups)],
            num_columns=sum(counts),
            token_columns=None,
            fresh=False,
            contiguous=[True] * len(self.groups),
        )

    # -- statistics ------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Blocks in use and in all, and how many full blocks were looked for and found."""
        return {
            "blocks_used": sum(group.pool.num_used for group in self.groups),
            "blocks_allocated": sum(group.pool.num_blocks for group in self.groups),
            "prefix_lookups": 0 if self.index is None else self.index.lookups,
            "prefix_hits": 0 if self.index is None else self.index.hits,
        }

    def waste(self, sequences: Iterable[CachedSequence]) -> float:
        """The share of held slots without a token; `sequences` are all that hold any."""
        size = self.block_size
        tokens_in: dict[tuple[int, int], int] = {}  # by group and block: a block that is shared counts once
        for sequence in sequences:
            for index, table in enumerate(sequence.tables):
                for number, block in enumerate(table.blocks):
                    filled = min(size, table.num_held_tokens - number * size)
                    tokens_in[index, block] = max(filled, tokens_in.get((index, block), 0))
        held = sum(group.pool.num_used for group in self.groups) * size
        return 1 - sum(tokens_in.values()) / held if held else 0.0


def _group_step(group: PageGroup, index: int, ranges: Sequence[TokenRange], cu_q: Tensor) -> GroupStep:
    """The part of a Step that layers of one group see. Slots beyond a sequence's range are not read."""
    device, tables = cu_q.device, [each.sequence.tables[index] for each in ranges]
    slots: list[int] = []
    held: list[int] = []
    for each, table in zip(ranges, tables, strict=True):
        stop = each.start + each.count
        slots += table.slots(each.stored or each.start, stop)
        held.append(stop - table.num_dropped_blocks * group.pool.block_size)
    written = None
    if len(slots) < sum(each.count for each in ranges):
        ends = accumulate(each.count for each in ranges)
        places = [
            place for each, end in zip(ranges, ends, strict=True) for place in range(end - each.num_written, end)
        ]
        written = torch.tensor(places, dtype=torch.int64, device=device)
    ragged = Ragged(
        cu_q,
        kv_len=torch.tensor(held, dtype=torch.int32, device=device),
        max_q=max((each.count for each in ranges), default=0),
        max_kv=max(held, default=0),
        block_table=group.table_tensor(tables, device),
    )
    return GroupStep(torch.tensor(slots, dtype=torch.int64, device=device), written, ragged)
