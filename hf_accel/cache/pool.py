"""Blocks: allocation, reference counts, the blocks of one sequence, and the index of those that others may find."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Sequence

from ..errors import OutOfBlocksError


class BlockPool:
    """Allocates `num_blocks` blocks and counts the references to each.

    A block is blank (it holds nothing of value), used (it has one reference or more), or cached (it has no
    reference, but the prefix index lists its content). Blank blocks are allocated first, then the least recently
    used cached block is evicted. A growable pool doubles when it has neither.

    max_cached: the number of cached blocks above which the least recently used one becomes blank; None for no limit.
    """

    def __init__(
        self, num_blocks: int, *, block_size: int, growable: bool = False, max_cached: int | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.growable = growable
        self.max_cached = max_cached
        self.index: PrefixIndex | None = None
        # This is a stack: the block freed last is allocated first. So the system commits no memory for pages
        # that were never written.
        self._blank = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        return len(self._references)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated without growing."""
        return len(self._blank) + len(self._cached)

    def size_for(self, num_blocks: int) -> int:
        """The size that the pool has after it has allocated `num_blocks` more blocks."""
        size, free = self.num_blocks, self.num_free
        while self.growable and free < num_blocks:
            size, free = 2 * size, free + size
        return size

    def require(self, num_blocks: int) -> None:
        """Raise OutOfBlocksError unless `num_blocks` blocks can be allocated. Nothing is evicted here."""
        if not self.growable and num_blocks > self.num_free:
            blocks = f"{self.num_blocks} blocks of {self.block_size} tokens are"
            found = (
                f"{self.num_free} of {blocks} free, {num_blocks} are needed"
                if self.num_free
                else f"all {blocks} in use"
            )
            raise OutOfBlocksError(
                f"{found}; raise CacheConfig(max_tokens=...), leave it None, or run fewer or shorter sequences"
            )

    def allocate(self) -> int:
        """Return a block with one reference. Raises OutOfBlocksError when a pool of fixed size has none left."""
        self.require(1)
        if not self._blank:
            self._evict_or_grow()
        block = self._blank.pop()
        self._references[block] = 1
        return block

    def _evict_or_grow(self) -> None:
        if self._cached:
            self._evict()
        else:
            self._blank.extend(reversed(range(self.num_blocks, 2 * self.num_blocks)))
            self.num_blocks *= 2

    def _evict(self) -> None:
        """Make the least recently used cached block blank."""
        block = next(iter(self._cached))
        assert self.index is not None
        self.index.remove(block)
        self.uncache(block)

    def retain(self, block: int) -> None:
        """Add a reference to a used or cached block. Raises ValueError for a blank block."""
        if block in self._references:
            self._references[block] += 1
        elif block in self._cached:
            del self._cached[block]
            self._references[block] = 1
        else:
            raise ValueError(f"block {block} is blank; only a used or cached block can be retained")

    def release(self, block: int) -> None:
        """Remove a reference. A block without references is cached if the prefix index lists it, and blank otherwise.

        Raises ValueError for a block that has no reference.
        """
        count = self._references.get(block)
        if count is None:
            raise ValueError(f"block {block} is not in use; it was released twice")
        if count > 1:
            self._references[block] = count - 1
            return
        del self._references[block]
        if self.index is not None and block in self.index:
            self._cached[block] = None
            if self.max_cached is not None and len(self._cached) > self.max_cached:
                self._evict()
        else:
            self._blank.append(block)

    def uncache(self, block: int) -> None:
        """Make a cached block blank, because the prefix index no longer lists it. A used block stays as it is."""
        if block in self._cached:
            del self._cached[block]
            self._blank.append(block)

    def reference_count(self, block: int) -> int:
        return self._references.get(block, 0)

    def is_writable(self, block: int) -> bool:
        """Return whether the block may be written: it has one reference, and the prefix index does not list it."""
        return self._references.get(block) == 1 and (self.index is None or block not in self.index)


class PrefixIndex:
    """Maps digests to blocks of a pool. prefixes.py says what a digest identifies.

    The index lists a block once, and each digest has one block at most.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        pool.index = self
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def items(self) -> ItemsView[bytes, int]:
        """Return the digests with their blocks, those that were added first in front."""
        return self._blocks.items()

    def find(self, digest: bytes) -> int | None:
        """Return the block with this digest. The caller must retain it."""
        return self._blocks.get(digest)

    def insert(self, digests: Sequence[bytes], blocks: Sequence[int]) -> list[int]:
        """Add blocks, and return those that were added: what is listed already keeps its block, or its digest."""
        # All are collected before the first is added, so that an error leaves the index as it was.
        pairs = zip(digests, blocks, strict=True)
        new = {d: block for d, block in pairs if d not in self._blocks and block not in self._digests}
        self._blocks.update(new)
        self._digests.update((block, digest) for digest, block in new.items())
        return list(new.values())

    def remove(self, block: int) -> None:
        """Remove a block whose content is about to change. The blocks after it can no longer be found."""
        del self._blocks[self._digests.pop(block)]

    def clear(self) -> None:
        """Remove all blocks."""
        blocks = list(self._digests)
        self._blocks.clear()
        self._digests.clear()
        for block in blocks:
            self.pool.uncache(block)


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

    def blocks_needed(self, num_tokens: int, *, each: bool = False) -> int:
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

    def slots_with(self, num_blocks: int, *, each: bool = False) -> int:
        """The number of tokens that can be appended if the pool has `num_blocks` free blocks."""
        num_blocks -= self._copies_last(1)
        return -self.num_tokens % self.pool.block_size + num_blocks * self.pool.block_size if num_blocks >= 0 else 0

    def append(self, num_tokens: int, copy: Copy = copy_nothing, *, each: bool = False) -> list[tuple[int, int]]:
        """Allocate slots for more tokens, and return the blocks that were copied as (source, destination).

        copy: copies the pages of these blocks; it is called before the table changes. each: whether each of the tokens
        may be taken back, which is the case here at all times. Raises what `copy` raises, and
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

    def missing(self, num_tokens: int, window: int | None) -> str | None:
        """Return what the table lacks for a pass after the first `num_tokens` tokens, as a clause; None if nothing."""
        held, needed = self.num_dropped_blocks * self.pool.block_size, max(0, num_tokens - (window or num_tokens) + 1)
        if not num_tokens or held <= needed:
            return None
        return f"a sliding window of {window} needs those from {needed} on, and the cache holds those from {held} on"

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

    def adopt(self, blocks: Sequence[int], num_tokens: int, *, num_dropped_blocks: int = 0) -> None:
        """Start an empty table with `num_tokens` tokens that `blocks` already hold.

        num_dropped_blocks: the blocks before them, which lie behind the window.

        Raises ValueError if the table is not empty, or if the tokens do not fill exactly these blocks.
        """
        num_filled = -(-num_tokens // self.pool.block_size)
        if self.blocks or self.num_tokens or num_dropped_blocks + len(blocks) != num_filled:
            raise ValueError(
                f"cannot adopt {len(blocks)} blocks as {num_tokens} tokens of a table of {self.num_tokens}, behind "
                f"{num_dropped_blocks} dropped blocks"
            )
        self._retain(blocks)
        self.num_tokens, self.num_dropped_blocks = num_tokens, num_dropped_blocks

    def mark(self, ends: Sequence[int]) -> None:
        """Ask for a state after so many first tokens, for other sequences; keys and values need none."""

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
