"""Keys and values within chunks: a token attends to those of its own chunk alone (Llama 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import ClassVar, Unpack

from ..group import PageGroup
from ..step import TokenRange
from .kind import GroupSettings, KeysAndValues


def chunks_of(start: int, count: int, chunk: int) -> list[tuple[int, int, int]]:
    """Return the tokens start..start+count-1 by the chunks that they stand in: (tokens, the chunk's first token, the
    end of the tokens)."""
    firsts = range(start // chunk * chunk, start + count, chunk)
    parts = [(first, min(first + chunk, start + count)) for first in firsts]
    return [(stop - max(first, start), first, stop) for first, stop in parts]


class ChunkGroup(PageGroup):
    """The pages of layers whose tokens attend within chunks. To attention each chunk is a sequence of its own, which
    begins with a block.
    """

    @property
    def chunk(self) -> int | None:  # type: ignore[override]
        return self.window

    def attended(
        self, each: TokenRange, dropped: int, queries: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int, int]]:
        assert self.window is not None
        return chunks_of(each.start, each.count, self.window)


@dataclass(frozen=True)
class Chunks(KeysAndValues):
    """Keys and values of which a layer keeps those of `window` tokens, which are a chunk."""

    sees_later: ClassVar[bool] = False
    device_clause: ClassVar[str | None] = "attends within chunks, whose pages are read on a CPU alone"
    ranks_clause: ClassVar[str | None] = "no rank knows how to attend within chunks"

    @property
    def mask_window(self) -> int | None:
        return None

    @property
    def chunk(self) -> int | None:
        return self.window

    def block_refusal(self, block_size: int) -> str | None:
        assert self.window is not None
        if self.window % block_size == 0:
            return None
        return (
            f"chunks of {self.window} tokens do not begin with blocks of {block_size}; "
            f"take CacheConfig(block_size={gcd(block_size, self.window)})"
        )

    def group(self, **settings: Unpack[GroupSettings]) -> ChunkGroup:
        return ChunkGroup(window=self.window, **settings)
