"""States of fixed size: what a recurrent layer keeps after a token, in pages of one block for each state.

A token's result needs the state after the token before it. A pass keeps the states of few tokens, so that drafts can
be taken back, and of many tokens the last one alone, and those where another prompt with the same beginning can go on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from ...kernels import cpu
from ...kernels.layouts import Ragged
from ...tensors import integers
from ..group import PageGroup
from ..pool import BlockPool, BlockTable, Copy, copy_nothing
from ..step import GroupStep, TokenRange
from .kind import GroupSettings, Kind, TokenNumbers
from .state_sizes import StateSizes

WINDOW = 2  # a token's result needs the state before it, and the pass makes its own
MOST_STATES = 32  # of a pass whose tokens may be taken back
FIRST_STATES = 8  # the initial capacity of a pool that grows
STATES_OF_A_SEQUENCE = 3  # after its last token, after the one before, and after a prompt whose beginning others share
MOST_SNAPSHOTS = 16  # the states of ended or longer sequences that are kept for prompts with the same beginning


class StateTable(BlockTable):
    """The blocks of one sequence that hold its states.

    blocks[i] holds the state after token tokens[i]; other tokens have no state. marks: the numbers of first tokens
    after which a state is kept for other sequences, if there is room for it. latest: the digest of the last state that
    others may find and that no mark has asked for: the next one takes its place.
    """

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self.tokens: list[int] = []
        self.marks: tuple[int, ...] = ()
        self.latest: bytes | None = None

    @property
    def num_held_tokens(self) -> int:
        return len(self.blocks)

    def blocks_needed(self, num_tokens: int, *, each: bool = False) -> int:
        return num_tokens if each and num_tokens <= MOST_STATES else min(num_tokens, 1)

    def has_slots(self, num_tokens: int) -> bool:
        return False

    def slots_with(self, num_blocks: int, *, each: bool = False) -> int:
        return min(num_blocks, MOST_STATES) if each else sys.maxsize if num_blocks else 0

    def append(self, num_tokens: int, copy: Copy = copy_nothing, *, each: bool = False) -> list[tuple[int, int]]:
        kept = self.kept(num_tokens, each=each)
        self.pool.require(len(kept))
        self.num_tokens += num_tokens
        self.tokens += kept
        self.blocks += [self.pool.allocate() for _ in kept]
        return []

    def kept(self, num_tokens: int, *, each: bool = False) -> list[int]:
        """Return the tokens whose states `append` would keep."""
        count, end = self.blocks_needed(num_tokens, each=each), self.num_tokens + num_tokens
        needed = list(range(end - count, end))
        room = sys.maxsize if self.pool.growable else self.pool.num_free - count
        marked = [mark - 1 for mark in self.marks if self.num_tokens < mark <= end - count]
        return marked[: max(0, room)] + needed

    def slots(self, start: int, stop: int) -> list[int]:
        """The slots of the states after tokens start..stop-1, of those that have one."""
        return [block for token, block in zip(self.tokens, self.blocks, strict=True) if start <= token < stop]

    def slot_before(self, token: int) -> int:
        """The slot of the state before a token; -1 before the first. Raises ValueError if it is not held."""
        if token == 0:
            return -1
        if token - 1 not in self.tokens:
            raise ValueError(f"the state before token {token} is not held; the table has those after {self.tokens}")
        return self.blocks[self.tokens.index(token - 1)]

    def missing(self, num_tokens: int, window: int | None) -> str | None:
        if num_tokens in (0, self.num_tokens) or num_tokens - 1 in self.tokens:
            return None
        return f"the recurrent state after them was not kept, and of {self.num_tokens} those after {self.tokens} were"

    def truncate(self, num_tokens: int) -> None:
        """Go back to the first `num_tokens` tokens. Raises ValueError if the state after them is not held."""
        missing = self.missing(num_tokens, None)
        if missing is not None:
            raise ValueError(f"cannot go back to {num_tokens} tokens: {missing}")
        while self.tokens and self.tokens[-1] >= num_tokens:
            self.pool.release(self.blocks.pop())
            self.tokens.pop()
        self.num_tokens = num_tokens

    def fork(self) -> StateTable:
        other = StateTable(self.pool)
        other._retain(self.blocks)
        other.num_tokens, other.tokens, other.latest = self.num_tokens, list(self.tokens), self.latest
        return other

    def adopt(self, blocks: Sequence[int], num_tokens: int, *, num_dropped_blocks: int = 0) -> None:
        """Start an empty table with the state after `num_tokens` tokens, which one block holds."""
        if self.blocks or self.num_tokens or len(blocks) != min(1, num_tokens):
            raise ValueError(
                f"cannot adopt {len(blocks)} blocks as the state after {num_tokens} tokens, in a table of "
                f"{self.num_tokens}"
            )
        self._retain(blocks)
        self.num_tokens, self.tokens = num_tokens, [num_tokens - 1][: len(blocks)]

    def mark(self, ends: Sequence[int]) -> None:
        self.marks = tuple(ends)

    def drop_before(self, token: int) -> None:
        while self.tokens and self.tokens[0] < token:
            self.pool.release(self.blocks.pop(0))
            self.tokens.pop(0)

    def release(self) -> None:
        super().release()
        self.tokens, self.marks, self.latest = [], (), None


@dataclass
class StateStep:
    """The states that a pass over B sequences of N tokens reads and writes.

    starts: [B + 1] int64, where each sequence begins in the row. before: [B] int64, the slots of the states before
    their first tokens, -1 for none. slots: [N] int64, where the state after each token is written, -1 for nowhere.
    given: [N] int64, 1 for each token of a prompt, and 0 for those that were generated.
    """

    starts: Tensor
    before: Tensor
    slots: Tensor
    given: Tensor

    @property
    def places(self) -> dict[str, Tensor]:
        """The keywords by which kernels take all but `given`."""
        return {"starts": self.starts, "before": self.before, "slots": self.slots}


class StateGroup(PageGroup):
    """The pages of recurrent layers; a block holds the state after one token. They are never quantized.

    A state is large, so there are pages for as many as were in use at a time, and not for all of the pool.
    """

    holds_tokens = False
    sees_padding = True
    branches = False

    def __init__(self, *, num_blocks: int, growable: bool, prefix_sharing: bool = False) -> None:
        super().__init__(
            window=WINDOW,
            num_blocks=num_blocks,
            block_size=1,
            growable=growable,
            prefix_sharing=prefix_sharing,
            quantized=None,
        )
        self.pool.max_cached = MOST_SNAPSHOTS
        self.shapes: dict[Any, torch.Size] = {}  # of the states that a layer's own code keeps, by their storages
        self._num_rows = FIRST_STATES

    @property
    def num_stored(self) -> int:
        return self._num_rows

    @property
    def used_bytes(self) -> float:
        return self.nbytes * self.pool.num_used / self._num_rows

    def first_needed(self, num_blocks: int, block_size: int) -> int:
        return max(0, num_blocks - 1)

    def publish(self, table: BlockTable, digests: Sequence[bytes], first: int) -> list[int]:
        # Sequences of one pass are computed side by side, so a state cannot be read in the pass that writes it.
        return []

    def publish_states(self, table: BlockTable, digests: Sequence[bytes], block_size: int) -> None:
        assert isinstance(table, StateTable) and self.index is not None
        for token, block in zip(table.tokens, table.blocks, strict=True):
            number, rest = divmod(token + 1, block_size)
            if rest or number > len(digests):
                continue
            added = self.index.insert(digests[number - 1 : number], [block])
            if added and token + 1 not in table.marks:
                self._replace(table, digests[number - 1])

    def _replace(self, table: StateTable, digest: bytes) -> None:
        """Keep one state of a sequence that goes on, so that a long answer does not take the places of others."""
        assert self.index is not None
        block = None if table.latest is None else self.index.find(table.latest)
        if block is not None and self.pool.reference_count(block) <= (block in table.blocks):
            self.index.remove(block)
            self.pool.uncache(block)
        table.latest = digest

    def blocks_to_keep(self, table: BlockTable, digests: Sequence[bytes], block_size: int) -> list[tuple[bytes, int]]:
        # One for each block of tokens would be many bytes: a state stays where a prompt ends, or parts from another.
        assert isinstance(table, StateTable)
        pairs = [
            (divmod(token + 1, block_size), block) for token, block in zip(table.tokens, table.blocks, strict=True)
        ]
        ends = [(number, block) for (number, rest), block in pairs if not rest and number * block_size in table.marks]
        return [(digests[number - 1], block) for number, block in ends if number <= len(digests)]

    def append(self, table: BlockTable, num_tokens: int, *, each: bool = False) -> None:
        assert isinstance(table, StateTable)
        self.make_pages(len(table.kept(num_tokens, each=each)))
        table.append(num_tokens, each=each)

    def make_pages(self, num_blocks: int) -> None:
        # The pool gives a block that was never used only if all before it hold something: so these are the first ones.
        needed = self.pool.num_used + self.pool.num_cached + num_blocks
        if needed > self._num_rows:
            rows = max(needed, 2 * self._num_rows)
            for storage in self.storages.values():
                storage.grow(rows)
            self._num_rows = rows

    def table(self, source: Tensor | None = None) -> StateTable:
        return StateTable(self.pool)

    def has_columns(self, layer_idx: int) -> bool:
        return False

    def num_blocks_of(self, num_tokens: int, source: Any) -> int:
        return STATES_OF_A_SEQUENCE

    def step(
        self, ranges: Sequence[TokenRange], tables: Sequence[BlockTable], *,
        runs: Sequence[list[tuple[int, int]]], cu_q: Tensor,
    ) -> GroupStep:  # fmt: skip
        slots: list[int] = []
        given: list[int] = []
        before: list[int] = []
        for each, table in zip(ranges, tables, strict=True):
            assert isinstance(table, StateTable)
            first = each.write_from or each.start
            written = {token: slot for token, slot in zip(table.tokens, table.blocks, strict=True) if token >= first}
            slots += [written.get(token, -1) for token in each.span]
            given += [int(token < each.num_prompt) for token in each.span]
            before.append(table.slot_before(each.start))
        starts = [0, *accumulate(each.count for each in ranges)]
        own = StateStep(integers(starts), integers(before), integers(slots), integers(given))
        ragged = Ragged(cu_q, kv_len=cu_q[1:] - cu_q[:-1], max_q=0, max_kv=0)
        return GroupStep(own.slots, None, ragged, own)


@dataclass(frozen=True)
class RecurrentStates(Kind):
    """States of fixed size of recurrent layers, after a token and before it.

    sizes: the numbers of one. steps_differ: see steps_of_prompts_differ.
    """

    sizes: StateSizes
    steps_differ: bool

    holds_tokens: ClassVar[bool] = False
    sees_later: ClassVar[bool] = False
    device_clause: ClassVar[str | None] = "has recurrent layers, whose states are read in pages on a CPU alone"
    ranks_clause: ClassVar[str | None] = "layers that are no attention need all that they keep on each rank"

    def group(self, **settings: Unpack[GroupSettings]) -> StateGroup:
        growable, num_blocks = settings["growable"], settings["num_blocks"]
        return StateGroup(
            # Each sequence has a block of keys and values at least, and two states; drafts take more of them.
            num_blocks=FIRST_STATES if growable else WINDOW * num_blocks + MOST_STATES,
            growable=growable,
            prefix_sharing=settings["prefix_sharing"] and not self.steps_differ,
        )

    def numbers(self, layer: Any) -> TokenNumbers:
        return TokenNumbers(1, 1, self.sizes.state, self.sizes.inputs, dtype=torch.float32, quantizes=False)

    def device_refusal(self, device: torch.device) -> str | None:
        # Without our kernel, a prompt would take longer than transformers' own code needs for it.
        missing = cpu.refusal()
        if missing is None or device.type not in ("cpu", "meta"):
            return super().device_refusal(device)
        return f"has recurrent layers, whose states only our kernels read in pages ({missing})"
