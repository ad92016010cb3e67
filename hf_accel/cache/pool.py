"""Blocks by number: who holds how many references to which, and which to give out next."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from ..config import positive_int
from ..errors import OutOfBlocksError


class Known(Protocol):
    """Which blocks hold something that may be asked for again."""

    def __contains__(self, block: int) -> bool: ...
    def forget(self, block: int) -> None: ...


class BlockPool:
    """Reference counts of `num_blocks` blocks.

    A block is blank (nothing of value in it), used (one reference or more), or cached (no reference, but the
    prefix index knows its content). Blank blocks are given out first, then the least recently used cached one.
    """

    def __init__(self, num_blocks: int, *, block_size: int, growable: bool = False) -> None:
        positive_int("num_blocks", num_blocks)
        positive_int("block_size", block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.growable = growable
        self.index: Known | None = None
        # A stack: the block freed last is taken first, so that pages never touched stay uncommitted.
        self._blank = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that can be given out without growing."""
        return len(self._blank) + len(self._cached)

    def size_for(self, num_blocks: int) -> int:
        """How many blocks the pool has once it has given out so many more."""
        size, free = self.num_blocks, self.num_free
        while self.growable and free < num_blocks:
            size, free = 2 * size, free + size
        return size

    def require(self, num_blocks: int) -> None:
        """Raise OutOfBlocksError, before anything is evicted, unless that many blocks can be given out."""
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
        """A block with one reference. Raises OutOfBlocksError when a pool of fixed size has none."""
        self.require(1)
        if not self._blank:
            self._make_blank()
        block = self._blank.pop()
        self._references[block] = 1
        return block

    def _make_blank(self) -> None:
        if self._cached:
            block = next(iter(self._cached))
            assert self.index is not None
            self.index.forget(block)
            self.blank(block)
        else:
            self._blank.extend(reversed(range(self.num_blocks, 2 * self.num_blocks)))
            self.num_blocks *= 2

    def retain(self, block: int) -> None:
        """One more reference to a used or cached block."""
        if block in self._references:
            self._references[block] += 1
        elif block in self._cached:
            del self._cached[block]
            self._references[block] = 1
        else:
            raise ValueError(f"block {block} is blank; only a used or cached block can be retained")

    def release(self, block: int) -> None:
        """One reference less; the last one makes the block cached, or blank if no index knows it."""
        count = self._references.get(block)
        if count is None:
            raise ValueError(f"block {block} is not in use; it was released twice")
        if count > 1:
            self._references[block] = count - 1
            return
        del self._references[block]
        if self.index is not None and block in self.index:
            self._cached[block] = None
        else:
            self._blank.append(block)

    def blank(self, block: int) -> None:
        """The index no longer knows this block: if nobody holds it, it has nothing of value."""
        if block in self._cached:
            del self._cached[block]
            self._blank.append(block)

    def reference_count(self, block: int) -> int:
        return self._references.get(block, 0)

    def is_writable(self, block: int) -> bool:
        """Whether its one holder may write: nobody else reads the block, and no index vouches for its content."""
        return self._references.get(block) == 1 and (self.index is None or block not in self.index)
