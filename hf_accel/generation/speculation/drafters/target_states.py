"""Drafts by a head that reads the target's own hidden states (EAGLE, Li et al. 2401.15077; EAGLE-3, 2503.01840)."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....cache.cached_sequence import CachedSequence
from ....cache.step import Step, TokenRange
from ...sequence import NO_DRAFT, Draft, Sequence
from .model import MAX_CHUNK, ModelDrafter, PartialDraft, Past
from .unread_states import FEW, StatesBook, UnreadStates


class Ahead(NamedTuple):
    """The steps of a call behind the first one, for which there are pages already.

    going: for each step, the first one too, how many of the sequences go on, the first ones. positions, slots: of the
    rows of these steps, one of each sequence that goes on.
    """

    going: list[int]
    positions: list[int]
    slots: list[int]


@dataclass(frozen=True)
class ReadRows:
    """A call of a head reads this: N tokens, and the states [N, H] that it reads them with.

    keep: the last row of each sequence, whose logits are wanted. step: what the first step writes and reads.
    """

    ids: list[int]
    positions: list[int]
    states: Tensor
    step: Step
    keep: list[int]


class Made(NamedTuple):
    """A call of a head gives this.

    tokens: the likeliest ones [steps, n], those of a sequence that has stopped being any; None if they are left to the
    caller. logits, states: those of the last step, [n, N] of the tokens that the head knows and [n, H].
    """

    tokens: list[list[int]] | None
    logits: Tensor
    states: Tensor


class HeadCalls(Protocol):
    """Calls a draft head."""

    def over_vocabulary(self, logits: Tensor, size: int) -> Tensor:
        """Return logits of the head [n, N] as those of so many tokens, -inf for those that it never drafts."""

    def narrow(self, states: Tensor) -> Tensor:
        """Return the states [N, H] that the head reads for those of the target, [N, C]."""

    def goes_ahead(self, count: int) -> bool:
        """Return whether a call of `count` rows can take several steps."""

    def read(self, rows: ReadRows, ahead: Ahead | None) -> Made:
        """Compute N tokens; with `ahead`, for which `goes_ahead` must hold, also those that follow."""


class HeadDrafter(ModelDrafter):
    """Drafts token by token with a head of the target. Its first pass reads all states that wait.

    The reader of a sequence's states is the head's pages of it: at a position they hold the target's state there, and
    the token after it. A sequence whose first tokens came from a shared prefix has no states of them; the head then
    attends to fewer tokens than the target does.

    calls: the runner of the head, which is the runner of this ModelDrafter. layers: the target's states that it reads.
    """

    name = "draft head"

    def __init__(self, calls: HeadCalls, layers: tuple[int, ...], *arguments: Any, **keywords: Any) -> None:
        runner: Any = calls
        super().__init__(runner, *arguments, **keywords)
        self.calls, self.layers = calls, layers
        self.book = StatesBook(self.pages.begin, CachedSequence.release)

    def watch(self, sequence: Sequence, start: int, states: Tensor) -> None:
        self.book.watch(sequence, start, states)

    def forget(self, sequence: Sequence) -> None:
        self.book.forget(sequence)

    def catch_up(self, sequences: abc.Sequence[Sequence]) -> None:
        """Read all states but the last one of sequences with more than FEW, MAX_CHUNK in a pass over all of them."""
        behind = []
        for sequence in sequences:
            unread = self.book.ready(sequence)
            if unread is not None and unread.count > FEW:
                behind.append((sequence, unread))
        while behind:
            parts, room = [], MAX_CHUNK
            for sequence, unread in behind:
                count = min(unread.count - 1, room)
                if count:
                    ids = sequence.tokens[unread.start + 1 : unread.start + 1 + count]
                    parts.append(PassPart(unread, ids))
                room -= count
            self._pass_over(parts, self.calls.narrow(_states(parts)))
            for part in parts:
                part.unread.take(len(part.ids))
            behind = [each for each in behind if each[1].count > 1]

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        self.catch_up(sequences)
        drafts: dict[Sequence, PartialDraft] = {}
        for sequence, length in zip(sequences, lengths, strict=True):
            unread = self.book.ready(sequence)
            if unread is not None and length:
                drafts[sequence] = PartialDraft(sequence, Past(unread.reader), length)
        if drafts:
            self._drafted_by_head(sorted(drafts.values(), key=lambda draft: -draft.length))
        made = (drafts.get(sequence) for sequence in sequences)
        return [NO_DRAFT if draft is None else Draft(draft.tokens, draft.distribution) for draft in made]

    def _drafted_by_head(self, drafts: list[PartialDraft]) -> None:
        """Generate drafts, of which the longest come first, so that those that go on are the first rows of a pass."""
        parts = []
        for draft in drafts:
            unread = self.book.ready(draft.sequence)
            assert unread is not None
            parts.append(PassPart(unread, draft.sequence.tokens[unread.start + 1 :]))
        states, longest = self.calls.narrow(_states(parts)), drafts[0].length
        plain = all(draft.sequence.sampling.plain for draft in drafts)
        if plain and self.calls.goes_ahead(len(states)):
            going = [sum(draft.length > number for draft in drafts) for number in range(longest)]
            made = self._pass_over(parts, states, going)
            assert made.tokens is not None
            for number, count in enumerate(going):
                for draft, token in zip(drafts[:count], made.tokens[number], strict=False):
                    draft.tokens.append(token)
        else:
            self._drafted_one_by_one(drafts, parts, states)
        for part in parts:
            part.unread.take(part.unread.count)
            part.unread.reader.truncate(part.unread.num_read)

    def _over_target_vocabulary(self, logits: Tensor) -> Tensor:
        return super()._over_target_vocabulary(self.calls.over_vocabulary(logits, self.num_tokens))

    def _drafted_one_by_one(self, drafts: list[PartialDraft], parts: list[PassPart], states: Tensor) -> None:
        counts = [len(part.ids) for part in parts]
        for number in range(drafts[0].length):
            going = [draft for draft in drafts if draft.length > number]
            if number:
                states = states[: len(going)]
                parts = [
                    PassPart(part.unread, draft.tokens[-1:], ahead=count + number - 1)
                    for part, draft, count in zip(parts, going, counts, strict=False)
                ]
            made = self._pass_over(parts, states)
            states = made.states
            _, chosen = self._next_tokens(going, self._over_target_vocabulary(made.logits))
            for draft, token in zip(going, chosen.read(), strict=True):
                draft.tokens.append(token)

    def _pass_over(self, parts: list[PassPart], states: Tensor, going: list[int] | None = None) -> Made:
        """Read parts of sequences with the states [N, H], which stand end to end.

        going: for each of several steps, how many of the sequences, the first ones, go on.
        """
        ids: list[int] = []
        positions: list[int] = []
        ranges, keep = [], []
        for index, part in enumerate(parts):
            cached, first, count = part.unread.reader, part.first, len(part.ids)
            more = 0 if going is None else sum(each > index for each in going) - 1
            self.pages.append(cached, first + count + more - cached.num_tokens, start=part.unread.num_read)
            ranges.append(TokenRange(cached, first, count))
            ids += self._in_vocabulary(part.ids)
            positions += range(part.unread.first + first, part.unread.first + first + count)
            keep.append(len(ids) - 1)
        rows = ReadRows(ids, positions, states, self.pages.step(ranges), keep)
        return self.calls.read(rows, None if going is None else _ahead(parts, going))


@dataclass
class PassPart:
    """A pass of a head reads this of a sequence: tokens, with the states of those before them.

    ahead: how many positions it has read besides the final ones.
    """

    unread: UnreadStates[CachedSequence]
    ids: list[int]
    ahead: int = 0

    @property
    def first(self) -> int:
        """Return the first of the tokens, counted in the pages of the head."""
        return self.unread.num_read + self.ahead


def _states(parts: list[PassPart]) -> Tensor:
    """Return the states of the target that parts of sequences are read with, [N, C]."""
    read = [part.unread.all()[: len(part.ids)] for part in parts]
    return read[0] if len(read) == 1 else torch.cat(read)


def _ahead(parts: list[PassPart], going: list[int]) -> Ahead:
    ahead = Ahead(going, [], [])
    for number, count in enumerate(going[1:]):
        for part in parts[:count]:
            place = part.first + len(part.ids) + number
            ahead.positions.append(part.unread.first + place)
            ahead.slots.extend(part.unread.reader.tables[0].slots(place, place + 1))
    return ahead
