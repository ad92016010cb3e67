"""Sequences over shared pages. Each sequence grows, forks, is truncated and ends independently of the others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .cached_sequence import CachedSequence
from .group import PageGroup
from .kinds.once import SourceRows
from .pool import BlockTable
from .prefixes import NO_MATCH, Prefixes, PrefixMatch, chain
from .step import Step, TokenRange, offsets

HOST = torch.device("cpu")
STATES_APART = 16  # tokens between the states that others may find, if no layer has keys and values


class Pages:
    """The pages of all groups of layers: allocation, prefix caching, sliding windows, and the plan of a pass."""

    def __init__(self, groups: list[PageGroup]) -> None:
        self.groups = groups
        self.sharing_size = next((g.pool.block_size for g in groups if g.holds_tokens), STATES_APART)
        shares = all(group.index is not None for group in groups)
        self.prefixes = Prefixes(groups, self.sharing_size) if shares else None
        self.epoch = 0

    @property
    def block_size(self) -> int:
        """Return the tokens in a block of keys and values, which come before other kinds."""
        return self.groups[0].pool.block_size

    @property
    def keeps_all(self) -> bool:
        """Return whether every layer keeps all tokens, so that a sequence can begin or go back anywhere."""
        return all(group.window is None for group in self.groups)

    @property
    def capacity(self) -> int | None:
        """The number of tokens that one sequence can have if it is alone; None if there is no limit."""
        bounded = [g.pool.num_blocks * g.pool.block_size for g in self.groups if not g.pool.growable and not g.rolls]
        return min(bounded, default=None)

    # -- prefix caching --------------------------------------------------------------------------------

    def use_salt(self, salt: bytes) -> None:
        """Forget all prefixes if they were computed with another salt.

        salt: identifies what K and V depend on besides the tokens (weights, adapters).
        """
        if self.prefixes is not None:
            self.prefixes.use_salt(salt)
            self.epoch = self.prefixes.epoch

    def clear_prefixes(self) -> None:
        """Forget all prefixes. After a pass that failed, their content may be wrong."""
        if self.prefixes is not None:
            self.prefixes.clear()
            self.epoch = self.prefixes.epoch

    def match_prefix(self, token_ids: Sequence[int], *, keeps_last: bool = False) -> PrefixMatch:
        """Return the longest known prefix of these tokens, for `begin`; see Prefixes.match."""
        # A fork over the same pages may have changed the salt.
        if self.prefixes is None or self.prefixes.epoch != self.epoch:
            return NO_MATCH
        return self.prefixes.match(token_ids, keeps_last=keeps_last)

    def begin(
        self, match: PrefixMatch = NO_MATCH, num_tokens: int | None = None, *, source: SourceRows | None = None
    ) -> CachedSequence:
        """Start a sequence with the first `num_tokens` tokens of a prefix (None: with all of it), or an empty one.

        Only if `keeps_all`, these may be fewer than all. source: what its tokens attend to besides each
        other.
        """
        size = self.sharing_size
        num_tokens = len(match.digests) * size if num_tokens is None else num_tokens
        sequence = CachedSequence([group.table(source) for group in self.groups], self.epoch, size)
        digests = match.digests[: -(-num_tokens // size)]
        try:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                if num_tokens:
                    group.adopt(table, digests, num_tokens, size)
        except BaseException:
            sequence.release()
            raise
        sequence.digests = digests[: num_tokens // size]
        return sequence

    def begin_with_prefix(self, token_ids: Sequence[int], source: SourceRows | None = None) -> CachedSequence:
        """Start a sequence with the cached blocks of these tokens. At least the last token is left to compute.

        Only whole blocks are used. A block of which only a part is used would be copied before it is written to; but
        a block that was published in the current pass is not written yet, so the copy would be wrong.
        """
        match = self.match_prefix(token_ids, keeps_last=True)
        sequence = self.begin(match, source=source)
        # States are kept where the same prompt, or one with a beginning that is known to be shared, can go on.
        ends = {(len(token_ids) - 1) // self.sharing_size, match.num_held} if self.prefixes is not None else ()
        marks = sorted(end * self.sharing_size for end in ends if end > len(match.digests))
        for table in sequence.tables:
            table.mark(marks)
        return sequence

    def publish(self, sequence: CachedSequence, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Let others find the sequence's full blocks, and return those that were added as (group, block).

        token_ids: the sequence's first tokens; it must not be truncated to fewer.
        """
        if self.prefixes is None or sequence.epoch != self.prefixes.epoch:
            return []
        first = len(sequence.digests)
        digests = [*sequence.digests, *chain(token_ids, self.sharing_size, sequence.digests)]
        added = self.prefixes.publish(sequence.tables, digests, first)
        sequence.digests = digests
        return added

    def publish_states(self, sequence: CachedSequence, num_computed: int) -> None:
        """Let others find the states after the sequence's first `num_computed` tokens, whose passes are done."""
        if self.prefixes is not None and sequence.epoch == self.prefixes.epoch:
            self.prefixes.publish_states(sequence.tables, sequence.digests, num_computed)

    def withdraw(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Hide published blocks, given as (group, block), because they will not be written. They stay allocated."""
        if self.prefixes is not None:
            self.prefixes.withdraw(blocks)

    # -- windows ---------------------------------------------------------------------------------------

    def slide(self, sequence: CachedSequence, start: int) -> None:
        """Release the blocks behind the sliding window of token `start`.

        Afterwards the sequence cannot be truncated to fewer than `start` tokens.
        """
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if group.window is not None:
                table.drop_before(start - group.window + 1)

    def missing(self, sequence: CachedSequence, num_tokens: int) -> str | None:
        """Return what the sequence lacks to go on after its first `num_tokens` tokens, as a clause; None if nothing.

        It lacks something if blocks were released that the token after them needs.
        """
        pairs = zip(self.groups, sequence.tables, strict=True)
        return next(filter(None, (table.missing(num_tokens, group.window) for group, table in pairs)), None)

    def require_held(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Raise UnsupportedError unless the sequence can be truncated to `num_tokens` tokens."""
        missing = self.missing(sequence, num_tokens)
        if missing is not None:
            raise UnsupportedError(
                f"cannot go back to {num_tokens} tokens: {missing}; crop less, or reset() the cache"
            )

    # -- room ------------------------------------------------------------------------------------------

    def free_blocks(self) -> list[int]:
        """For each group, the number of blocks that can be allocated; sys.maxsize if the pool can grow."""
        return [sys.maxsize if group.pool.growable else group.pool.num_free for group in self.groups]

    def blocks_for(self, sequence: CachedSequence, count: int) -> list[int]:
        """For each group, the number of blocks that `count` more tokens need, but at most a sliding window's."""
        return [
            table.blocks_needed(count if group.window is None else min(count, group.window))
            for group, table in zip(self.groups, sequence.tables, strict=True)
        ]

    def room(self, sequence: CachedSequence, most: int, *, start: int | None = None) -> int:
        """Return how many tokens can be appended, at most `most`. start: see `append`."""
        self.slide(sequence, sequence.num_tokens if start is None else start)
        for group, free, table in zip(self.groups, self.free_blocks(), sequence.tables, strict=True):
            if not group.pool.growable or start is not None:
                most = min(most, table.slots_with(free, each=start is not None))
        return most

    def can_append(self, sequence: CachedSequence, count: int, *, start: int | None = None) -> bool:
        return self.room(sequence, count, start=start) == count

    def append(self, sequence: CachedSequence, count: int, *, start: int | None = None) -> None:
        """Allocate slots for `count` more tokens. Raises what PageGroup.append raises; no token is then added.

        start: the first token that the next pass computes, if the sequence already has slots for it, or if the tokens
        may be taken back: a state is then kept after each of them, up to MOST_STATES. Blocks behind its sliding window
        are released here, when a new block is needed, and not in `truncate`: so the sequence can still be truncated.
        """
        each = start is not None
        if self.fill(sequence, count):
            return
        self.slide(sequence, sequence.num_tokens if start is None else start)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.pool.require(table.blocks_needed(count, each=each))
        longer: list[BlockTable] = []
        try:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                group.append(table, count, each=each)
                longer.append(table)
        except BaseException:
            for table in longer:
                table.truncate(table.num_tokens - count)
            raise

    @staticmethod
    def fill(sequence: CachedSequence, count: int) -> bool:
        """Allocate slots for `count` more tokens where no block is needed for them; returns whether that is so."""
        for table in sequence.tables:
            if not table.has_slots(count):
                return False
        for table in sequence.tables:
            table.num_tokens += count
        return True

    # -- a pass ----------------------------------------------------------------------------------------

    def step(self, ranges: Sequence[TokenRange], device: torch.device = HOST) -> Step:
        """Describe a forward pass over the tokens of these ranges, which stand end to end in one row of the input.

        device: where its tensors are. A Runner takes them on the host, and moves them in one copy.
        """
        windowed = _runs(ranges, device, windowed=True)
        plain = _runs(ranges, device, windowed=False) if any(each.seen_in_windows for each in ranges) else windowed
        found = [plain if group.window is None else windowed for group in self.groups]
        return Step(
            groups=[
                group.step(ranges, [each.sequence.tables[index] for each in ranges], runs=runs, cu_q=cu_q)
                for index, (group, (runs, cu_q)) in enumerate(zip(self.groups, found, strict=True))
            ],
            num_columns=sum(each.count for each in ranges),
            token_columns=None,
            fresh=False,
            contiguous=[True] * len(self.groups),
            looks_ahead=any(each.seen is not None for each in ranges),
        )

    # -- statistics ------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Count the blocks in use, the blocks in all, and the full blocks looked up and found in the prefix index."""
        return {
            "blocks_used": sum(group.pool.num_used for group in self.groups),
            "blocks_allocated": sum(group.pool.num_blocks for group in self.groups),
            "prefix_lookups": 0 if self.prefixes is None else self.prefixes.lookups,
            "prefix_hits": 0 if self.prefixes is None else self.prefixes.hits,
        }

    def waste(self, sequences: Iterable[CachedSequence]) -> float:
        """Return the share of allocated slots that hold no token. sequences: all that hold blocks."""
        tokens_in: dict[tuple[int, int], int] = {}  # the key is (group, block), so a shared block counts once
        for sequence in sequences:
            for index, table in enumerate(sequence.tables):
                size = table.pool.block_size
                for number, block in enumerate(table.blocks):
                    filled = min(size, table.num_held_tokens - number * size)
                    tokens_in[index, block] = max(filled, tokens_in.get((index, block), 0))
        held = sum(group.pool.num_used * group.pool.block_size for group in self.groups)
        return 1 - sum(tokens_in.values()) / held if held else 0.0


def _runs(
    ranges: Sequence[TokenRange], device: torch.device, *, windowed: bool
) -> tuple[list[list[tuple[int, int]]], Tensor]:
    """Return the runs of each range, see TokenRange.runs, and where each of them begins in the pass."""
    runs = [each.runs(windowed=windowed) for each in ranges]
    return runs, offsets([count for each in runs for count, _ in each], device)
