"""Which full blocks hold which tokens, so that equal beginnings are stored, and computed, once."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from .pool import BlockPool

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
