"""Drafts by a head that reads the target's own hidden states (EAGLE, Li et al. 2401.15077; EAGLE-3, 2503.01840)."""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....cache.cached_sequence import CachedSequence
from ....cache.pages import Pages
from ....cache.pool import BlockTable
from ....cache.step import Step, TokenRange
from ....fused.draft_programme import LIKELIEST_TOKENS, Choice, DraftRows, MadeDrafts, SequenceRows, TreeRoom
from ....fused.state_rows import StateRows
from ....kernels.cpu.draws import INVERSE, LIKELIEST, RACE
from ...sequence import NO_DRAFT, Draft, Sequence, Shape
from ..verifiers.verifier import Place
from .drafter import FEW, TRAINED
from .model import MAX_CHUNK, ModelDrafter, PartialDraft, Past
from .unread_states import StatesBook, UnreadStates

CALLS_TO_KNOW = 2  # the first finds how the layer is called, the second tries a draft
TOGETHER = 128  # the most states of all sequences that are read together with a draft, which is then one call
BRANCHES, MOST_BRANCHES = 4, 16  # the tokens of a step from which the next one goes on; and a kernel's limit


class ReadRange(NamedTuple):
    """A call of a head reads this of a sequence: as many rows, behind the first `start` tokens of the head's pages.

    position: of the first of them.
    """

    cached: CachedSequence
    start: int
    rows: int
    position: int


class ReadRows(NamedTuple):
    """A call of a head reads this: N tokens, and the states that it reads them with.

    states: of the target, or with is_own of the head, end to end. ranges: the tokens of each sequence, end to end.
    pages: the head's, which have slots for all that the call writes.
    """

    ids: list[int]
    states: list[StateRows]
    ranges: list[ReadRange]
    pages: Pages
    is_own: bool = False

    @property
    def positions(self) -> list[int]:
        return [at for each in self.ranges for at in range(each.position, each.position + each.rows)]

    @property
    def ends(self) -> list[int]:
        """Return the last row of each sequence."""
        return [end - 1 for end in accumulate(each.rows for each in self.ranges)]

    def step(self) -> Step:
        """Return what the call writes and reads as a pass over pages."""
        return self.pages.step([TokenRange(each.cached, each.start, each.rows) for each in self.ranges])

    def drafting(
        self, steps: list[int] | None = None, nodes: list[int] | None = None, choice: Choice = LIKELIEST_TOKENS
    ) -> DraftRows:
        """Return the rows as a draft of so many steps for each sequence, and as many nodes of its tree; of one step
        if nothing else is said.
        """
        size, plans, blocks = self.pages.block_size, [], []
        for index, (cached, start, count, position) in enumerate(self.ranges):
            table = cached.tables[0]
            blocks.append(table.blocks)
            taken = 1 if steps is None else steps[index]
            before = start - table.num_dropped_blocks * size
            plans.append(SequenceRows(count, before, position, taken, 0 if nodes is None else nodes[index]))
        return DraftRows(self.ids, self.states, plans, blocks, self.is_own, choice, keeps_last=steps is None)


class Made(NamedTuple):
    """A call of a head gives this: logits [n, N] of the tokens that it knows, and its states [n, H]."""

    logits: Tensor
    states: Tensor


class HeadCalls(Protocol):
    """Calls a draft head."""

    def over_vocabulary(self, logits: Tensor, size: int) -> Tensor:
        """Return logits of the head [n, N] as those of so many tokens, -inf for those that it never drafts."""

    def any_states(self) -> Tensor:
        """Return states that the head can read, [1, C], which are nothing's."""

    def goes_ahead(self, count: int) -> bool:
        """Return whether a call of `count` rows can be a whole draft."""

    def draft(self, rows: ReadRows, steps: list[int], nodes: list[int], choice: Choice) -> MadeDrafts:
        """Read rows, and draft for each sequence, the longest first, in one call, for which `goes_ahead` must hold."""

    def read(self, rows: ReadRows) -> Made:
        """Compute N tokens; returns what the last one of each sequence gives."""


class HeadDrafter(ModelDrafter):
    """Drafts with a head of the target. Its first pass reads all states that wait.

    Where a whole draft is one call, that can be a tree: of greedy tokens, or of those that are first in the race by
    which the model's own token is drawn (verify="seeded").

    The reader of a sequence's states is the head's pages of it: at a position they hold the target's state there, and
    the token after it. A sequence whose first tokens came from a shared prefix has no states of them; the head then
    attends to fewer tokens than the target does.

    calls: the runner of the head, which is the runner of this ModelDrafter. layers: the target's states that it reads.
    """

    name = "draft head"
    trees = True
    expected = TRAINED

    def __init__(self, calls: HeadCalls, layers: tuple[int, ...], *arguments: Any, **keywords: Any) -> None:
        runner: Any = calls
        super().__init__(runner, *arguments, **keywords)
        self.calls, self.layers = calls, layers
        self.book = StatesBook(self.pages.begin, CachedSequence.release)
        self._chosen: tuple[Any, Choice | None] | None = None  # how the tokens of one Sampling are chosen
        self._spare: BlockTable | None = None  # blocks for the last tokens of branches
        self._warm_up()

    def _warm_up(self) -> None:
        """Read one token with any state, until a draft is one call, or it is known not to be one.

        Otherwise the first draft would do so, and its time would be taken for that of others.
        """
        for _ in range(CALLS_TO_KNOW):
            if not self.calls.goes_ahead(1):
                states, reader = self.calls.any_states(), self.pages.begin()
                self.calls.read(self._rows([PassPart(UnreadStates(reader, 0, 0, [StateRows.of(states)]), [0])]))
                reader.release()

    def watch_rows(self, sequence: Sequence, start: int, rows: StateRows) -> None:
        self.book.watch(sequence, start, rows)

    def forget(self, sequence: Sequence) -> None:
        self.book.forget(sequence)

    def catch_up(self, sequences: abc.Sequence[Sequence]) -> None:
        """Read all states but the last one of sequences with many, MAX_CHUNK in a pass over all of them."""
        behind, few = [], max(2, min(FEW, TOGETHER // len(sequences)))
        for sequence in sequences:
            unread = self.book.ready(sequence)
            if unread is not None and unread.count > few:
                behind.append((sequence, unread))
        while behind:
            parts, room = [], MAX_CHUNK
            for sequence, unread in behind:
                count = min(unread.count - 1, room)
                if count:
                    ids = sequence.tokens[unread.start + 1 : unread.start + 1 + count]
                    parts.append(PassPart(unread, ids))
                room -= count
            self.calls.read(self._rows(parts))
            for part in parts:
                part.unread.take(len(part.ids))
            behind = [each for each in behind if each[1].count > 1]

    def drafts_trees(self, sequences: abc.Sequence[Sequence]) -> bool:
        choice = self._choice(sequences)
        return choice is not None and choice.draws.kind != INVERSE

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        return self._proposed(sequences, [Shape(length, 0) for length in lengths])

    def propose_trees(self, sequences: abc.Sequence[Sequence], shapes: abc.Sequence[Shape]) -> list[Draft]:
        return self._proposed(sequences, shapes)

    def _proposed(self, sequences: abc.Sequence[Sequence], shapes: abc.Sequence[Shape]) -> list[Draft]:
        """Draft for sequences, which have caught up: trees where shapes have nodes."""
        asked: list[tuple[Shape, Sequence, UnreadStates[CachedSequence]]] = []
        for sequence, shape in zip(sequences, shapes, strict=True):
            unread = self.book.ready(sequence)
            if unread is not None and shape.depth:
                asked.append((shape, sequence, unread))
        if not asked:
            return [NO_DRAFT] * len(sequences)
        asked.sort(key=lambda each: -each[0].depth)  # those that go on are then the first rows of a step
        parts = [PassPart(unread, sequence.tokens[unread.start + 1 :]) for _, sequence, unread in asked]
        drafted, count = [sequence for _, sequence, _ in asked], sum(len(part.ids) for part in parts)
        steps, nodes = [shape.depth for shape, _, _ in asked], [shape.nodes for shape, _, _ in asked]
        choice, width = self._choice(drafted), _width(nodes, steps[0])
        if choice is None or not self.calls.goes_ahead(max(count, width * len(drafted))):
            made = self._drafted_one_by_one(drafted, parts, steps)
        else:
            rows = self._rows(parts, steps=None if any(nodes) else steps)
            made = self._drafted_ahead(drafted, rows, choice, steps=steps, nodes=nodes)
        for _, _, unread in asked:
            unread.take(unread.count)
            unread.reader.truncate(unread.num_read)
        if drafted == sequences:
            return made
        found = dict(zip(drafted, made, strict=True))
        return [found.get(sequence, NO_DRAFT) for sequence in sequences]

    def _choice(self, sequences: abc.Sequence[Sequence]) -> Choice | None:
        """Return how one call draws tokens for these sequences, without random numbers; None if none can."""
        sampling = sequences[0].settings.sampling
        if any((own := each.settings.sampling) is not sampling and own.key != sampling.key for each in sequences):
            return None
        if self._chosen is None or self._chosen[0] is not sampling:
            draws = sampling.native_draws(self.verifier.draws)
            takes = draws is not None and (draws.kind == LIKELIEST or self.num_tokens <= self.target_tokens)
            self._chosen = sampling, Choice(draws) if draws is not None and takes else None
        return self._chosen[1]

    def _drafted_ahead(
        self, sequences: list[Sequence], rows: ReadRows, choice: Choice, *, steps: list[int], nodes: list[int]
    ) -> list[Draft]:
        """Generate drafts in one call."""
        kind = choice.draws.kind
        if kind != LIKELIEST:
            places = [Place(sequence.seed, len(sequence.tokens)) for sequence in sequences]
            numbers = [self.verifier.draft_number(p.next(step)) for step in range(steps[0]) for p in places]
            choice = replace(choice, numbers=array("q" if kind == RACE else "d", numbers))
        if kind == INVERSE:
            choice = replace(choice, probabilities=torch.zeros(steps[0], len(sequences), self.target_tokens))
        elif any(nodes):
            choice = replace(choice, tree=self._room(nodes, steps[0]))
        made = self.calls.draft(rows, steps, nodes, choice)
        if made.parents is not None:
            return [
                Draft(own, source=self.name, parents=of) for own, of in zip(made.tokens, made.parents, strict=True)
            ]
        drawn_from = choice.probabilities
        if drawn_from is None:
            return [Draft(own, source=self.name) for own in made.tokens]
        return [Draft(own, drawn_from[: len(own), index], self.name) for index, own in enumerate(made.tokens)]

    def _room(self, nodes: list[int], steps: int) -> TreeRoom:
        """Return room for trees of so many nodes, with blocks for the last tokens of each branch."""
        width, group = _width(nodes, steps), self.pages.groups[0]
        size = group.pool.block_size
        each = -(-(size + steps - 2) // size)
        count = 2 * len(nodes) * width * each
        if self._spare is None:
            self._spare = group.table()
        missing = count - len(self._spare.blocks)
        if missing > 0:
            group.append(self._spare, missing * size)
        return TreeRoom(width, self._spare.blocks[:count], each)

    def _over_target_vocabulary(self, logits: Tensor) -> Tensor:
        return super()._over_target_vocabulary(self.calls.over_vocabulary(logits, self.num_tokens))

    def _drafted_one_by_one(self, sequences: list[Sequence], parts: list[PassPart], steps: list[int]) -> list[Draft]:
        drafts = [
            PartialDraft(sequence, Past(part.unread.reader), length)
            for sequence, part, length in zip(sequences, parts, steps, strict=True)
        ]
        counts, own = [len(part.ids) for part in parts], list[StateRows]()
        for number in range(steps[0]):
            going = [draft for draft in drafts if draft.length > number]
            if number:
                own = [own[0].part(0, len(going))]
                parts = [
                    PassPart(part.unread, draft.tokens[-1:], ahead=count + number - 1)
                    for part, draft, count in zip(parts, going, counts, strict=False)
                ]
            made = self.calls.read(self._rows(parts, own))
            own = [StateRows.of(made.states)]
            _, chosen = self._next_tokens(going, self._over_target_vocabulary(made.logits))
            for draft, token in zip(going, chosen.read(), strict=True):
                draft.tokens.append(token)
        return [Draft(draft.tokens, draft.distribution) for draft in drafts]

    def _rows(
        self, parts: list[PassPart], own: list[StateRows] | None = None, *, steps: list[int] | None = None
    ) -> ReadRows:
        """Return parts of sequences as rows, with slots for them and for those of later steps.

        own: the head's own states that are read; None or empty for the target's. steps: of each sequence that a chain
        is drafted for in one call.
        """
        ids: list[int] = []
        ranges: list[ReadRange] = []
        states = list(own or ())
        for index, part in enumerate(parts):
            unread, count = part.unread, len(part.ids)
            cached, start = unread.reader, unread.num_read + part.ahead
            more = 0 if steps is None else steps[index] - 1
            self.pages.append(cached, start + count + more - cached.num_tokens, start=unread.num_read)
            ranges.append(ReadRange(cached, start, count, unread.first + start))
            ids += self._in_vocabulary(part.ids)
            if not own:
                states += unread.beginning(count)
        return ReadRows(ids, states, ranges, self.pages, bool(own))


@dataclass
class PassPart:
    """A pass of a head reads this of a sequence: tokens, with the states of those before them.

    ahead: how many positions it has read besides the final ones.
    """

    unread: UnreadStates[CachedSequence]
    ids: list[int]
    ahead: int = 0


def _width(nodes: list[int], depth: int) -> int:
    """Return from how many tokens a step of trees goes on; 1 for chains."""
    most = max(nodes)
    return max(1, min(most, MOST_BRANCHES, max(BRANCHES, -(-most // depth))))
