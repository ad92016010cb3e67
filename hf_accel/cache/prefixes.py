"""The prefixes that sequences share: which blocks hold the tokens that a prompt begins with, in every group."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .group import PageGroup
from .pool import BlockPool, BlockTable

# With 2^32 blocks, the probability of any collision is about 2^-65, so tokens are not compared.
DIGEST_BYTES = 16
CONTENT_BYTES = 8


class PrefixMatch(NamedTuple):
    """The longest known prefix of some tokens.

    digests: those of its blocks. num_held: the blocks that some group knows, if others lack what comes after them.
    """

    digests: list[bytes]
    num_held: int


NO_MATCH = PrefixMatch([], 0)


class Prefixes:
    """Finds the blocks of prefixes in the indexes of all groups, and adds blocks to them.

    A prefix ends with a full block. Its digest covers the block's tokens and the digest of the block before it, as in
    vLLM's automatic prefix caching. So it identifies all tokens up to the block's end, which keys, values and states
    depend on. `salt` identifies everything else that they depend on (weights, adapters). A prefix is known if every
    group holds what the token after it needs: all blocks, those of a sliding window, or the state after the prefix.
    vLLM's hybrid cache manager does the same.
    """

    def __init__(self, groups: Sequence[PageGroup], block_size: int) -> None:
        self.groups, self.block_size = groups, block_size
        self.lookups = 0  # full blocks looked up
        self.hits = 0  # full blocks found
        self.salt = b""
        # The number of times the indexes were cleared. Blocks computed in an earlier epoch must not be inserted.
        self.epoch = 0

    @property
    def is_empty(self) -> bool:
        return not self.keeps and not any(group.index for group in self.groups)

    @property
    def keeps(self) -> bool:
        """Return whether blocks stay on the disk."""
        return any(group.kept is not None for group in self.groups)

    def match(self, token_ids: Sequence[int], *, keeps_last: bool = False) -> PrefixMatch:
        """Return the longest known prefix of `token_ids`. The caller must retain its blocks.

        keeps_last: whether the last of the tokens must not belong to the prefix, because it is computed in any case.
        """
        digests = list(chain(token_ids, self.block_size))
        self.lookups += len(digests)
        if keeps_last:
            del digests[max(0, len(token_ids) - 1) // self.block_size :]
        length, held = self._longest(digests, on_disk=self.keeps)
        if self.keeps and not self._read(digests[:length]):
            length, held = self._longest(digests, on_disk=False)
        self.hits += length
        return PrefixMatch(digests[:length], held)

    def _longest(self, digests: Sequence[bytes], *, on_disk: bool) -> tuple[int, int]:
        """Return the blocks of the longest known prefix, and those that some group knows."""
        length, held = len(digests), 0
        while True:
            known = [group.num_known(digests[:length], self.block_size, on_disk=on_disk) for group in self.groups]
            held = max(held, *known)
            if min(known) == length:
                return length, held
            length = min(known)

    def _read(self, digests: Sequence[bytes]) -> bool:
        """Read what groups lack of the blocks of a prefix from the disk; returns whether they have all of it then."""
        retained: list[tuple[BlockPool, int]] = []  # which must not make room for those that are read
        try:
            for group in self.groups:
                assert group.index is not None
                missing = []
                for digest in digests[group.first_needed(len(digests), self.block_size) :]:
                    block = group.index.find(digest)
                    if block is None:
                        missing.append(digest)
                    else:
                        group.pool.retain(block)
                        retained.append((group.pool, block))
                if missing and not self._read_blocks(group, missing):
                    return False
            return True
        finally:
            for pool, block in reversed(retained):
                pool.release(block)

    @staticmethod
    def _read_blocks(group: PageGroup, digests: Sequence[bytes]) -> bool:
        has_room = group.pool.growable or group.pool.num_free >= len(digests)
        return has_room and group.kept is not None and group.kept.read(digests)

    def publish(self, tables: Sequence[BlockTable], digests: Sequence[bytes], first: int) -> list[tuple[int, int]]:
        """Add the blocks from number `first` on of a sequence's tables, and return those added as (group, block).

        A state is added by `publish_states`.
        """
        added: list[tuple[int, int]] = []
        try:
            for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
                added += [(number, block) for block in group.publish(table, digests, first)]
        except BaseException:
            self.withdraw(added)
            raise
        return added

    def publish_states(self, tables: Sequence[BlockTable], digests: Sequence[bytes], num_computed: int) -> None:
        """Add the states that a sequence holds after full blocks, if the passes that write them are done.

        All full blocks go to the disk, if blocks stay there.
        """
        done = digests[: num_computed // self.block_size]
        for group, table in zip(self.groups, tables, strict=True):
            group.publish_states(table, done, self.block_size)
            if group.kept is not None:
                group.kept.keep(group.blocks_to_keep(table, done, self.block_size))

    def withdraw(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Remove published blocks, given as (group, block), because they will not be written. They stay allocated."""
        for number, block in blocks:
            index = self.groups[number].index
            if index is not None and block in index:
                index.remove(block)

    def use_salt(self, salt: bytes) -> None:
        """Clear the indexes, and leave the disk alone, if their blocks were computed with another salt."""
        if salt != self.salt:
            self.clear()
            self.salt = salt
            for group in self.groups:
                group.kept = None

    def clear(self) -> None:
        """Remove all blocks, because their content may be wrong (for example, the weights have changed)."""
        self.epoch += 1
        for group in self.groups:
            if group.index is not None:
                group.index.clear()


def content_number(*parts: bytes) -> int:
    """Return a negative number that is another one for other bytes, for a token of which its id does not tell all."""
    digest = hashlib.blake2b(digest_size=CONTENT_BYTES)
    for part in parts:
        digest.update(part)
    return -1 - (int.from_bytes(digest.digest(), "little") >> 1)


def chain(token_ids: Sequence[int], block_size: int, known: Sequence[bytes] = ()) -> Iterator[bytes]:
    """Yield the digests of the full blocks of these tokens, behind those that are known."""
    previous = known[-1] if known else b""
    for number in range(len(known), len(token_ids) // block_size):
        tokens = array("q", token_ids[number * block_size : (number + 1) * block_size]).tobytes()
        previous = hashlib.blake2b(previous + tokens, digest_size=DIGEST_BYTES).digest()
        yield previous
