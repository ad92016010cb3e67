"""Blocks by number: who holds them, which to give out next, and which full ones hold what tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ..config import positive_int
from ..errors import OutOfBlocksError


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
        self.index: PrefixIndex | None = None
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


DIGEST_BYTES = 16  # at 2^32 blocks the odds of any collision are about 2^-65: tokens need not be compared


class PrefixIndex:
    """Digest of a full block and everything before it -> block.

    The chain of digests (as in vLLM's automatic prefix caching) makes a block's digest stand for its tokens
    and its whole history, which is what its keys and values depend on; `salt` stands for all else that they do.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        pool.index = self
        self.lookups = 0  # full blocks asked for
        self.hits = 0  # full blocks found
        self.salt = b""
        self.epoch = 0  # how often everything was forgotten: what was computed in another epoch is not known here
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """The blocks of the longest known beginning, in order. They are not retained: the caller adopts them."""
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
        """Know the full blocks of a sequence; returns those that are new here.

        Content that is known already keeps its first block.
        """
        new: dict[int, bytes] = {}  # all of them before the first is known: a failure leaves the index as it was
        known = 0
        previous = b""
        while known < len(blocks) and (digest := self._digests.get(blocks[known])) is not None:
            previous, known = digest, known + 1
        for number, digest in enumerate(self._chain(token_ids, previous, known), start=known):
            if digest not in self._blocks and blocks[number] not in self._digests:
                new[blocks[number]] = digest
        self._blocks.update((digest, block) for block, digest in new.items())
        self._digests.update(new)
        return list(new)

    def forget(self, block: int) -> None:
        """Drop a block that is about to hold something else. Blocks after it can no longer be reached."""
        del self._blocks[self._digests.pop(block)]

    def use_salt(self, salt: bytes) -> None:
        """Forget the blocks of any other salt."""
        if salt != self.salt:
            self.clear()
            self.salt = salt

    def clear(self) -> None:
        """Drop everything, as when the weights have changed."""
        self.epoch += 1
        blocks = list(self._digests)
        self._blocks.clear()
        self._digests.clear()
        for block in blocks:
            self.pool.blank(block)

    def _chain(self, token_ids: Sequence[int], previous: bytes, first: int) -> Iterator[bytes]:
        """Digests of the full blocks from number `first` on; `previous` is the digest before it."""
        size = self.pool.block_size
        for number in range(first, len(token_ids) // size):
            tokens = array("q", token_ids[number * size : (number + 1) * size]).tobytes()
            previous = hashlib.blake2b(previous + tokens, digest_size=DIGEST_BYTES).digest()
            yield previous
