"""Keys and values that are computed once: those of an encoder's output, which each decoder token attends to.

The first pass of a sequence writes them, and no later one does. They have the length of the encoder's output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import OutOfBlocksError
from ...kernels.layouts import Ragged
from ...tensors import integers
from ..group import PageGroup
from ..pool import BlockPool, BlockTable, Copy, copy_nothing
from ..step import GroupStep, TokenRange, offsets


class OnceTable(BlockTable):
    """The blocks of one sequence that hold keys and values of its source.

    source: the encoder's output [T, C] of this sequence. num_tokens counts the tokens of the decoder, as in the tables
    of other groups; the blocks hold all T keys as soon as there is one such token.
    """

    def __init__(self, pool: BlockPool, source: Tensor | None) -> None:
        super().__init__(pool)
        self.source = source
        self.length = 0 if source is None else len(source)

    @property
    def num_held_tokens(self) -> int:
        return self.length if self.blocks else 0

    def blocks_needed(self, num_tokens: int, *, each: bool = False) -> int:
        return -(-self.length // self.pool.block_size) if num_tokens and not self.blocks else 0

    def has_slots(self, num_tokens: int) -> bool:
        return bool(self.blocks)

    def slots_with(self, num_blocks: int, *, each: bool = False) -> int:
        return sys.maxsize if self.blocks_needed(1) <= num_blocks else 0

    def append(self, num_tokens: int, copy: Copy = copy_nothing, *, each: bool = False) -> list[tuple[int, int]]:
        count = self.blocks_needed(num_tokens)
        self.pool.require(count)
        self.blocks += [self.pool.allocate() for _ in range(count)]
        self.num_tokens += num_tokens
        return []

    def slots(self, start: int, stop: int) -> list[int]:
        """The slots of keys start..stop-1 of the source."""
        size = self.pool.block_size
        return [self.blocks[place // size] * size + place % size for place in range(start, stop)]

    def missing(self, num_tokens: int, window: int | None) -> str | None:
        return None

    def truncate(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def fork(self) -> OnceTable:
        other = OnceTable(self.pool, self.source)
        other._retain(self.blocks)
        other.num_tokens = self.num_tokens
        return other

    def adopt(self, blocks: Sequence[int], num_tokens: int, *, num_dropped_blocks: int = 0) -> None:
        raise ValueError("a beginning that sequences share says nothing of their sources; such models share none")

    def drop_before(self, token: int) -> None:
        """Release nothing: each token attends to the whole source."""


def require_room(groups: Sequence[PageGroup], source: Tensor) -> None:
    """Raise OutOfBlocksError if the pages cannot hold the keys of an encoder's output [T, C]."""
    pools = [group.pool for group in groups if isinstance(group, OnceGroup) and not group.pool.growable]
    most = min((pool.num_blocks * pool.block_size for pool in pools), default=None)
    if most is not None and len(source) > most:
        raise OutOfBlocksError(
            f"the encoder's output has {len(source)} rows, and the cache holds {most}; shorten the input, or raise "
            "max_tokens"
        )


@dataclass
class OnceStep:
    """The rows whose keys a pass writes.

    sources: the encoder's output [1, M, C] of the sequences that begin; None if none does.
    """

    sources: Tensor | None


class OnceGroup(PageGroup):
    """The pages of the attention to an encoder's output."""

    holds_tokens = False
    rolls = True  # whatever the length of a sequence, its blocks hold no tokens of it

    def table(self, source: Tensor | None = None) -> OnceTable:
        return OnceTable(self.pool, source)

    def num_blocks_of(self, num_tokens: int, source: Tensor | None) -> int:
        return 0 if source is None else -(-len(source) // self.pool.block_size)

    def step(
        self, ranges: Sequence[TokenRange], tables: Sequence[BlockTable], *,
        runs: Sequence[list[tuple[int, int]]], cu_q: Tensor,
    ) -> GroupStep:  # fmt: skip
        """Make the part of a Step for these layers.

        Attention is not causal here: each query sees all keys. Neighbours that see the same ones, as beams of one
        prompt do, are one sequence to attention, which then reads these keys once.
        """
        slots: list[int] = []
        sources: list[Tensor] = []
        rows: list[list[int]] = []
        lengths: list[int] = []
        counts: list[int] = []
        for each, table in zip(ranges, tables, strict=True):
            assert isinstance(table, OnceTable)
            if each.start == 0 and table.source is not None:
                slots += table.slots(0, table.length)
                sources.append(table.source)
            if rows and rows[-1] == table.blocks and lengths[-1] == table.length:
                counts[-1] += each.count
                continue
            rows.append(table.blocks)
            lengths.append(table.length)
            counts.append(each.count)
        ragged = Ragged(
            offsets(counts, torch.device("cpu")),
            kv_len=integers(lengths, dtype=torch.int32),
            max_q=max(counts, default=0),
            max_kv=max(lengths, default=0),
            block_table=self.table_tensor(rows, torch.device("cpu")),
        )
        return GroupStep(integers(slots), None, ragged, OnceStep(torch.cat(sources)[None] if sources else None))
