"""The blocks of one sequence, in every group of layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from .pool import BlockTable


@dataclass
class CachedSequence:
    """One sequence: a block table for each group of layers.

    epoch: the epoch of the prefixes when the sequence began; its blocks are published only in that epoch. None: its
    blocks are never published, because its K and V do not follow from token ids. sharing_size: the tokens of a block
    that others may find. digests: those of its blocks that were published, or found. token_ids: the ids of its
    tokens, if the caller does not keep them elsewhere. truncate() leaves those of removed tokens until others take
    their places.
    """

    tables: list[BlockTable]
    epoch: int | None
    sharing_size: int
    digests: list[bytes] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.tables[0].num_tokens

    def fork(self) -> CachedSequence:
        other = CachedSequence([], self.epoch, self.sharing_size, list(self.digests), list(self.token_ids))
        try:
            for table in self.tables:
                other.tables.append(table.fork())
        except BaseException:
            other.release()
            raise
        return other

    def take(self, other: CachedSequence) -> None:
        """Go on with the blocks of a fork, which takes those of this sequence."""
        self.tables, other.tables = other.tables, self.tables

    def truncate(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens."""
        del self.digests[num_tokens // self.sharing_size :]
        for table in self.tables:
            if num_tokens:
                table.truncate(min(num_tokens, table.num_tokens))
            else:
                table.release()

    def release(self) -> None:
        self.digests = []
        for table in self.tables:
            table.release()
