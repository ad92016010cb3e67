"""The blocks of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .pool import BlockPool

Copy = Callable[[list[tuple[int, int]]], object]  # copies whole blocks, given as (source, destination)


def copy_nothing(copies: list[tuple[int, int]]) -> None:
    """A Copy for tables whose blocks have no pages."""


class BlockTable:
    """The block table of one sequence.

    Token t is stored in blocks[t // block_size - num_dropped_blocks], at offset t % block_size.
    blocks: the numbers of the blocks that the sequence still holds. num_dropped_blocks: the number of leading blocks
    that were released because they lie behind the sliding window. num_tokens: all tokens, also those of the dropped
    blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.num_tokens = 0
        self.num_dropped_blocks = 0

    @property
    def num_held_tokens(self) -> int:
        return self.num_tokens - self.num_dropped_blocks * self.pool.block_size

    def blocks_needed(self, num_tokens: int) -> int:
        """The number of blocks that `append` would allocate."""
        return self._num_new(num_tokens) + self._copies_last(num_tokens)

    def _num_new(self, num_tokens: int) -> int:
        return max(0, -(-(self.num_held_tokens + num_tokens) // self.pool.block_size) - len(self.blocks))

    def _copies_last(self, num_tokens: int) -> bool:
        """Return whether `append` must copy the last block first, because it is partly filled and shared
        (copy-on-write).
        """
        filled = self.num_held_tokens % self.pool.block_size
        return num_tokens > 0 and filled > 0 and not self.pool.is_writable(self.blocks[-1])

    def has_slots(self, num_tokens: int) -> bool:
        """Return whether `append` needs no block: the last one has enough free slots, and only this table uses it."""
        size = self.pool.block_size
        filled = self.num_tokens % size
        return 0 < filled <= size - num_tokens and self.pool.is_writable(self.blocks[-1])

    def slots_with(self, num_blocks: int) -> int:
        """The number of tokens that can be appended if the pool has `num_blocks` free blocks."""
        num_blocks -= self._copies_last(1)
        return -self.num_tokens % self.pool.block_size + num_blocks * self.pool.block_size if num_blocks >= 0 else 0

    def append(self, num_tokens: int, copy: Copy = copy_nothing) -> list[tuple[int, int]]:
        """Allocate slots for more tokens, and return the blocks that were copied as (source, destination).

        copy: copies the pages of these blocks; it is called before the table changes. Raises what `copy` raises, and
        OutOfBlocksError. After an error the table is as it was, and no block is allocated.
        """
        num_new, copies_last = self._num_new(num_tokens), self._copies_last(num_tokens)
        self.pool.require(num_new + copies_last)
        fresh: list[int] = []
        try:
            for _ in range(num_new + copies_last):
                fresh.append(self.pool.allocate())
            copies = [(self.blocks[-1], fresh[-1])] if copies_last else []
            copy(copies)
        except BaseException:
            while fresh:
                self.pool.release(fresh.pop())
            raise
        if copies_last:
            self.pool.release(self.blocks[-1])
            self.blocks[-1] = fresh.pop()
        self.blocks += fresh
        self.num_tokens += num_tokens
        return copies

    def slots(self, start: int, stop: int) -> list[int]:
        """The slots of tokens start..stop-1, where slot = block * block_size + offset.

        Raises ValueError for tokens that the table does not hold.
        """
        size = self.pool.block_size
        first = self.num_dropped_blocks * size
        if not (first <= start <= stop <= self.num_tokens) and start != stop:
            raise ValueError(f"tokens {start}..{stop} are not held; the table has {first}..{self.num_tokens}")
        return [self.blocks[(t - first) // size] * size + t % size for t in range(start, stop)]

    def truncate(self, num_tokens: int) -> None:
        """Go back to the first `num_tokens` tokens, releasing whole blocks."""
        size = self.pool.block_size
        if not self.num_dropped_blocks * size <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"cannot go back to {num_tokens} tokens: the table holds "
                f"{self.num_dropped_blocks * size}..{self.num_tokens}"
            )
        keep = -(-num_tokens // size) - self.num_dropped_blocks
        while len(self.blocks) > keep:
            self.pool.release(self.blocks.pop())
        self.num_tokens = num_tokens

    def fork(self) -> BlockTable:
        """Return a second table that shares the blocks."""
        other = BlockTable(self.pool)
        other._retain(self.blocks)
        other.num_tokens, other.num_dropped_blocks = self.num_tokens, self.num_dropped_blocks
        return other

    def _retain(self, blocks: Sequence[int]) -> None:
        """Add these blocks to the table. If that fails, the table releases all its blocks."""
        try:
            for block in blocks:
                self.pool.retain(block)
                self.blocks.append(block)
        except BaseException:
            self.release()
            raise

    def adopt(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Start an empty table with `num_tokens` tokens that `blocks` already hold.

        Raises ValueError if the table is not empty, or if the tokens do not fill exactly these blocks.
        """
        if self.blocks or self.num_tokens or len(blocks) != -(-num_tokens // self.pool.block_size):
            raise ValueError(
                f"cannot adopt {len(blocks)} blocks as {num_tokens} tokens of a table of {self.num_tokens}"
            )
        self._retain(blocks)
        self.num_tokens = num_tokens

    def drop_before(self, token: int) -> None:
        """Release each full block whose tokens all come before `token`."""
        count = min(token, self.num_tokens) // self.pool.block_size - self.num_dropped_blocks
        for block in self.blocks[: max(0, count)]:
            self.pool.release(block)
        if count > 0:
            del self.blocks[:count]
            self.num_dropped_blocks += count

    def release(self) -> None:
        """Release all blocks, the last one first, so that the beginning of a prompt is evicted last."""
        while self.blocks:
            self.pool.release(self.blocks.pop())
        self.num_tokens = self.num_dropped_blocks = 0
