"""Keys and values that are computed once: those of an encoder's output, or of images, which the tokens attend to.

The first pass of a sequence writes them, and no later one does. They have the length of what they are made of.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from ...errors import NotRaggedError, OutOfBlocksError
from ...kernels.layouts import Ragged
from ...tensors import integers
from ..group import PageGroup
from ..pool import BlockPool, BlockTable, Copy, copy_nothing
from ..step import GroupStep, TokenRange, offsets
from .kind import GroupSettings, KeysAndValues, Kind, TokenNumbers

WHOLE = 0  # the part of a source that all tokens see where nothing is said


@dataclass(frozen=True, eq=False)
class SourceRows:
    """The rows that the tokens of a sequence attend to besides each other: the output [M, C] of an encoder or a tower.

    argument: the name by which the decoder of a model without an encoder takes it; None for an encoder-decoder.
    parts: the rows of each part, which stand in `states` end to end; each has blocks of its own. seen: for each token
    of the prompt, the part that it sees, and how many of its first rows; those behind the prompt see what its last
    token does. Empty if all tokens see the one part. numbers: what the decoder takes by a name for each token of the
    prompt, [T], in a tensor [1, 1, T, 1]; those behind the prompt have the number of its last token.
    """

    states: Tensor
    argument: str | None = None
    parts: tuple[int, ...] = ()
    seen: Sequence[tuple[int, int]] = ()
    numbers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the rows of each part."""
        return self.parts or (len(self.states),)

    def runs(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield how many of the tokens start..start+count-1 see the same rows: (tokens, part, rows)."""
        if not self.seen:
            yield count, WHOLE, len(self.states)
            return
        last = len(self.seen) - 1
        seen = (self.seen[min(index, last)] for index in range(start, start + count))
        for (part, rows), own in groupby(seen):
            yield len(list(own)), part, rows

    def numbers_of(self, start: int, count: int) -> dict[str, Tensor]:
        """Return the numbers [count] of these tokens, by name; those that say nothing, as they are 1, are left out."""
        places = torch.arange(start, start + count)
        found = {name: each[places.clamp(max=len(each) - 1)] for name, each in self.numbers.items()}
        return {name: each for name, each in found.items() if bool((each != 1).any())}

    def __len__(self) -> int:
        return len(self.states)


class OnceTable(BlockTable):
    """The blocks of one sequence that hold keys and values of its source, if it has one.

    num_tokens counts the tokens of the decoder, as in the tables of other groups; the blocks hold the keys of all rows
    of the source as soon as there is one such token.
    """

    def __init__(self, pool: BlockPool, source: SourceRows | None) -> None:
        super().__init__(pool)
        self.source = source
        self.lengths = () if source is None else source.lengths
        counts = [-(-length // pool.block_size) for length in self.lengths]
        self._ends = [0, *accumulate(counts)]

    @property
    def num_held_tokens(self) -> int:
        return sum(self.lengths) if self.blocks else 0

    def blocks_needed(self, num_tokens: int, *, each: bool = False) -> int:
        return self._ends[-1] if num_tokens and not self.blocks else 0

    def has_slots(self, num_tokens: int) -> bool:
        return not self.blocks_needed(1)

    def slots_with(self, num_blocks: int, *, each: bool = False) -> int:
        return sys.maxsize if self.blocks_needed(1) <= num_blocks else 0

    def append(self, num_tokens: int, copy: Copy = copy_nothing, *, each: bool = False) -> list[tuple[int, int]]:
        count = self.blocks_needed(num_tokens)
        self.pool.require(count)
        self.blocks += [self.pool.allocate() for _ in range(count)]
        self.num_tokens += num_tokens
        return []

    def blocks_of(self, part: int) -> list[int]:
        """Return the blocks that hold the keys of a part of the source."""
        return self.blocks[self._ends[part] : self._ends[part + 1]]

    def all_slots(self) -> list[int]:
        """Return the slots of the keys of all rows of the source."""
        size, slots = self.pool.block_size, []
        for part, length in enumerate(self.lengths):
            blocks = self.blocks_of(part)
            slots += [blocks[place // size] * size + place % size for place in range(length)]
        return slots

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


def require_room(groups: Sequence[PageGroup], source: SourceRows) -> None:
    """Raise OutOfBlocksError if the pages cannot hold the keys of a source."""
    pools = [group.pool for group in groups if isinstance(group, OnceGroup) and not group.pool.growable]
    most = min((pool.num_blocks * pool.block_size for pool in pools), default=None)
    if most is not None and any(OnceTable(pool, source).blocks_needed(1) > pool.num_blocks for pool in pools):
        raise OutOfBlocksError(
            f"the encoder's output has {len(source)} rows, and the cache holds {most}; shorten the input, or raise "
            "max_tokens"
        )


@dataclass
class OnceStep:
    """The rows whose keys a pass writes, and the tokens that attend to some.

    sources: the rows [1, M, C] of the sequences that begin; None if none does. tokens: the indices of the tokens that
    have a source; None if all have one. arguments: what the decoder takes besides the tokens, by name.
    """

    sources: Tensor | None
    tokens: Tensor | None = None
    arguments: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_attended(self) -> bool:
        """Return whether a token of the pass has a source."""
        return self.tokens is None or len(self.tokens) > 0


class OnceGroup(PageGroup):
    """The pages of the attention to sources."""

    holds_tokens = False
    rolls = True  # whatever the length of a sequence, its blocks hold no tokens of it

    def table(self, source: SourceRows | None = None) -> OnceTable:
        return OnceTable(self.pool, source)

    def num_blocks_of(self, num_tokens: int, source: SourceRows | None) -> int:
        return OnceTable(self.pool, source).blocks_needed(1)

    def step(
        self, ranges: Sequence[TokenRange], tables: Sequence[BlockTable], *,
        runs: Sequence[list[tuple[int, int]]], cu_q: Tensor,
    ) -> GroupStep:  # fmt: skip
        """Make the part of a Step for these layers.

        Attention is not causal here: each query sees all keys that its token sees. Neighbours that see the same ones,
        as beams of one prompt do, are one sequence to attention, which then reads these keys once. Tokens without a
        source are no queries.
        """
        slots: list[int] = []
        begun: list[SourceRows] = []
        rows: list[list[int]] = []
        lengths: list[int] = []
        counts: list[int] = []
        attending: list[tuple[SourceRows, TokenRange, int]] = []
        first = 0
        for each, table in zip(ranges, tables, strict=True):
            assert isinstance(table, OnceTable)
            source, place, first = table.source, first, first + each.count
            if source is None:
                continue
            attending.append((source, each, place))
            if each.start == 0:
                slots += table.all_slots()
                begun.append(source)
            for count, part, length in source.runs(each.start, each.count):
                blocks = table.blocks_of(part)
                if rows and rows[-1] == blocks and lengths[-1] == length:
                    counts[-1] += count
                    continue
                rows.append(blocks)
                lengths.append(length)
                counts.append(count)
        ragged = Ragged(
            offsets(counts, torch.device("cpu")),
            kv_len=integers(lengths, dtype=torch.int32),
            max_q=max(counts, default=0),
            max_kv=max(lengths, default=0),
            block_table=self.table_tensor(rows, torch.device("cpu")),
        )
        return GroupStep(integers(slots), None, ragged, _once_step(begun, attending, first))


def _once_step(begun: list[SourceRows], attending: list[tuple[SourceRows, TokenRange, int]], count: int) -> OnceStep:
    """Make the OnceStep of a pass of `count` tokens.

    begun: the sources of the sequences that begin. attending: those of all sequences that have one, with their range
    and the index of its first token in the pass.
    """
    states = torch.cat([source.states for source in begun])[None] if begun else None
    names = {source.argument for source, _, _ in attending}
    if len(names) > 1:
        raise NotRaggedError("prompts of one pass bring what they attend to by different arguments")
    own = sum(each.count for _, each, _ in attending)
    tokens = None
    if own < count:
        places = [place for _, each, first in attending for place in range(first, first + each.count)]
        tokens = integers(places)
    step = OnceStep(states, tokens)
    name = next(iter(names), None)
    if name is None:
        return step
    if states is not None:
        step.arguments[name] = states
    given: dict[str, Tensor] = {}
    place = 0
    for source, each, _ in attending:
        for key, numbers in source.numbers_of(each.start, each.count).items():
            if key not in given:
                given[key] = numbers.new_ones(own)
            given[key][place : place + each.count] = numbers
        place += each.count
    step.arguments |= {key: numbers.view(1, 1, own, 1) for key, numbers in given.items()}
    return step


@dataclass(frozen=True)
class SourceKind(Kind):
    """The keys and values of a source, such as images, that a layer of a decoder attends to, and to no tokens."""

    holds_tokens: ClassVar[bool] = False
    device_clause: ClassVar[str | None] = "attends to images by keys whose pages are read on a CPU alone"
    ranks_clause: ClassVar[str | None] = "layers that attend to images need all of their keys on each rank"

    def group(self, **settings: Unpack[GroupSettings]) -> PageGroup:
        return OnceGroup(window=None, **(settings | {"prefix_sharing": False}))

    def numbers(self, layer: Any) -> TokenNumbers:
        return KeysAndValues(None).numbers(layer)
