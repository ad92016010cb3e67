"""The allocation of blocks, their reference counts, and the index of full blocks for prefix caching."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ..errors import OutOfBlocksError
from ..keywords import positive_int


class BlockPool:
    """Allocates `num_blocks` blocks and counts the references to each.

    A block is blank (it holds nothing of value), used (it has one reference or more), or cached (it has no
    reference, but the prefix index lists its content). Blank blocks are allocated first, then the least recently
    used cached block is evicted. A growable pool doubles when it has neither.
    """

    def __init__(self, num_blocks: int, *, block_size: int, growable: bool = False) -> None:
        positive_int("num_blocks", num_blocks)
        positive_int("block_size", block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.growable = growable
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
            block = next(iter(self._cached))
            assert self.index is not None
            self.index.remove(block)
            self.uncache(block)
        else:
            self._blank.extend(reversed(range(self.num_blocks, 2 * self.num_blocks)))
            self.num_blocks *= 2

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


# With 2^32 blocks, the probability of any collision is about 2^-65, so tokens are not compared.
DIGEST_BYTES = 16


class PrefixIndex:
    """Maps the digest of a full block to the block.

    Each digest covers the block's tokens and the digest of the block before it, as in vLLM's automatic prefix
    caching. So it identifies all tokens up to the block's end, which its keys and values depend on. `salt`
    identifies everything else that they depend on (weights, adapters).
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        pool.index = self
        self.lookups = 0  # full blocks looked up
        self.hits = 0  # full blocks found
        self.salt = b""
        # The number of times the index was cleared. Blocks computed in an earlier epoch must not be inserted.
        self.epoch = 0
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Return the cached blocks of the longest prefix of `token_ids`, in order. The caller must retain them."""
        found: list[int] = []
        self.lookups += len(token_ids) // self.pool.block_size
        for digest in self._chain(token_ids, b"", 0):
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        self.hits += len(found)
        return found

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Add the full blocks of a sequence to the index, and return those that were added.

        If the index already has a block with the same content, it keeps that block.
        """
        # All digests are collected before the first is added, so that an error leaves the index as it was.
        new: dict[int, bytes] = {}
        num_indexed = 0
        previous = b""
        while num_indexed < len(blocks) and (digest := self._digests.get(blocks[num_indexed])) is not None:
            previous, num_indexed = digest, num_indexed + 1
        for number, digest in enumerate(self._chain(token_ids, previous, num_indexed), start=num_indexed):
            if digest not in self._blocks and blocks[number] not in self._digests:
                new[blocks[number]] = digest
        self._blocks.update((digest, block) for block, digest in new.items())
        self._digests.update(new)
        return list(new)

    def remove(self, block: int) -> None:
        """Remove a block whose content is about to change. The blocks after it can no longer be found."""
        del self._blocks[self._digests.pop(block)]

    def use_salt(self, salt: bytes) -> None:
        """Clear the index if its blocks were computed with another salt."""
        if salt != self.salt:
            self.clear()
            self.salt = salt

    def clear(self) -> None:
        """Remove all blocks, because their content may be wrong (for example, the weights have changed)."""
        self.epoch += 1
        blocks = list(self._digests)
        self._blocks.clear()
        self._digests.clear()
        for block in blocks:
            self.pool.uncache(block)

    def _chain(self, token_ids: Sequence[int], previous: bytes, first: int) -> Iterator[bytes]:
        """Yield the digests of the full blocks from number `first` on. previous: the digest of the block before."""
        size = self.pool.block_size
        for number in range(first, len(token_ids) // size):
            tokens = array("q", token_ids[number * size : (number + 1) * size]).tobytes()
            previous = hashlib.blake2b(previous + tokens, digest_size=DIGEST_BYTES).digest()
            yield previous
