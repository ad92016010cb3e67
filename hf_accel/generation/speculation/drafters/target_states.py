"""Drafts by a head that reads the target's own hidden states (EAGLE, Li et al. 2401.15077; EAGLE-3, 2503.01840)."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....cache.cached_sequence import CachedSequence
from ....cache.pool import BlockTable
from ....cache.step import Step, TokenRange
from ....fused.draft_programme import LIKELIEST_TOKENS, Choice, TreeRoom
from ....kernels.cpu.draws import INVERSE, LIKELIEST
from ....tensors import integers
from ...sequence import NO_DRAFT, Draft, Sequence, Shape
from .model import MAX_CHUNK, ModelDrafter, PartialDraft, Past
from .unread_states import FEW, StatesBook, UnreadStates

CALLS_TO_KNOW = 2  # the first finds how the layer is called, the second tries a draft
BRANCHES, MOST_BRANCHES = 4, 16  # the tokens of a step from which the next one goes on; and a kernel's limit


class Ahead(NamedTuple):
    """The steps of a call: for each, the first one too, how many of the sequences go on, the first ones; and how
    tokens are chosen.
    """

    going: list[int]
    choice: Choice = LIKELIEST_TOKENS


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

    tokens: those of chains [steps, n], of a sequence that has stopped any; None if they are left to the caller.
    logits, states: those of the last step, [n, N] of the tokens that the head knows and [n, H].
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

    def any_states(self) -> Tensor:
        """Return states that the head can read, [1, H], which are nothing's."""

    def goes_ahead(self, count: int) -> bool:
        """Return whether a call of `count` rows can take several steps."""

    def read(self, rows: ReadRows, ahead: Ahead | None) -> Made:
        """Compute N tokens; with `ahead`, for which `goes_ahead` must hold, also those that follow."""


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

    def __init__(self, calls: HeadCalls, layers: tuple[int, ...], *arguments: Any, **keywords: Any) -> None:
        runner: Any = calls
        super().__init__(runner, *arguments, **keywords)
        self.calls, self.layers = calls, layers
        self.book = StatesBook(self.pages.begin, CachedSequence.release)
        self._spare: BlockTable | None = None  # blocks for the last tokens of branches
        self._warm_up()

    def _warm_up(self) -> None:
        """Read one token with any state, until a draft is one call, or it is known not to be one.

        Otherwise the first draft would do so, and its time would be taken for that of others.
        """
        for _ in range(CALLS_TO_KNOW):
            if not self.calls.goes_ahead(1):
                states, reader = self.calls.any_states(), self.pages.begin()
                self._pass_over([PassPart(UnreadStates(reader, 0, 0, [states]), [0])], states)
                reader.release()

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

    def drafts_trees(self, sequences: abc.Sequence[Sequence]) -> bool:
        choice = self._choice(sequences)
        return choice is not None and choice.draws.kind != INVERSE

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        return self._proposed(sequences, [Shape(length, 0) for length in lengths])

    def propose_trees(self, sequences: abc.Sequence[Sequence], shapes: abc.Sequence[Shape]) -> list[Draft]:
        return self._proposed(sequences, shapes)

    def _proposed(self, sequences: abc.Sequence[Sequence], shapes: abc.Sequence[Shape]) -> list[Draft]:
        """Draft for sequences: trees where shapes have nodes."""
        self.catch_up(sequences)
        drafts: dict[Sequence, PartialDraft] = {}
        nodes: dict[Sequence, int] = {}
        for sequence, shape in zip(sequences, shapes, strict=True):
            unread = self.book.ready(sequence)
            if unread is not None and shape.depth:
                drafts[sequence] = PartialDraft(sequence, Past(unread.reader), shape.depth)
                nodes[sequence] = shape.nodes
        made: dict[Sequence, Draft] = {}
        if drafts:
            longest_first = sorted(drafts.values(), key=lambda draft: -draft.length)
            made = self._drafted_by_head(longest_first, [nodes[draft.sequence] for draft in longest_first])
        return [made.get(sequence, NO_DRAFT) for sequence in sequences]

    def _drafted_by_head(self, drafts: list[PartialDraft], nodes: list[int]) -> dict[Sequence, Draft]:
        """Generate drafts, of which the longest come first, so that those that go on are the first rows of a pass.

        nodes: the most tokens of each tree; all are 0 for chains.
        """
        parts = []
        for draft in drafts:
            unread = self.book.ready(draft.sequence)
            assert unread is not None
            parts.append(PassPart(unread, draft.sequence.tokens[unread.start + 1 :]))
        states, sequences = self.calls.narrow(_states(parts)), [draft.sequence for draft in drafts]
        choice = self._choice(sequences)
        width = _width(nodes, drafts[0].length)
        if choice is None or not self.calls.goes_ahead(max(len(states), width * len(drafts))):
            self._drafted_one_by_one(drafts, parts, states)
            made = [Draft(draft.tokens, draft.distribution) for draft in drafts]
        else:
            made = self._drafted_ahead(drafts, parts, states, choice=choice, nodes=nodes)
        for part in parts:
            part.unread.take(part.unread.count)
            part.unread.reader.truncate(part.unread.num_read)
        return dict(zip(sequences, made, strict=True))

    def _choice(self, sequences: abc.Sequence[Sequence]) -> Choice | None:
        """Return how one call draws tokens for these sequences, without random numbers; None if none can."""
        sampling = sequences[0].settings.sampling
        draws = sampling.native_draws(self.verifier.draws)
        others = (own for each in sequences if (own := each.settings.sampling) is not sampling)
        if draws is None or any(own.key != sampling.key for own in others):
            return None
        is_drawn = draws.kind != LIKELIEST
        return None if is_drawn and self.num_tokens > self.target_tokens else Choice(draws)

    def _drafted_ahead(
        self, drafts: list[PartialDraft], parts: list[PassPart], states: Tensor, *, choice: Choice, nodes: list[int]
    ) -> list[Draft]:
        """Generate drafts in one call."""
        going = [sum(draft.length > number for draft in drafts) for number in range(drafts[0].length)]
        kind, places = choice.draws.kind, [draft.place for draft in drafts]
        if kind != LIKELIEST:
            numbers = [self.verifier.draft_number(p.next(step)) for step in range(len(going)) for p in places]
            choice = replace(choice, numbers=choice.draws.numbers(numbers))
        if kind == INVERSE:
            shape = len(going), len(drafts), self.target_tokens
            choice = replace(choice, probabilities=torch.zeros(shape))
        elif max(nodes):
            choice = replace(choice, tree=self._room(nodes, len(going)))
        made = self._pass_over(parts, states, Ahead(going, choice))
        if choice.tree is not None:
            return _trees(choice.tree)
        assert made.tokens is not None
        tokens = [list(each) for each in zip(*made.tokens, strict=True)]
        drawn_from = choice.probabilities
        return [
            Draft(own[: draft.length], None if drawn_from is None else drawn_from[: draft.length, index])
            for index, (draft, own) in enumerate(zip(drafts, tokens, strict=True))
        ]

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
        spare = integers(self._spare.blocks[:count], dtype=torch.int32)
        return TreeRoom.of(width, nodes, spare.view(2, len(nodes), width, each))

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

    def _pass_over(self, parts: list[PassPart], states: Tensor, ahead: Ahead | None = None) -> Made:
        """Read parts of sequences with the states [N, H], which stand end to end. ahead: the steps that follow."""
        going = None if ahead is None or ahead.choice.tree is not None else ahead.going
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
        return self.calls.read(rows, ahead)


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


def _width(nodes: list[int], depth: int) -> int:
    """Return from how many tokens a step of trees goes on; 1 for chains."""
    most = max(nodes)
    return max(1, min(most, MOST_BRANCHES, max(BRANCHES, -(-most // depth))))


def _trees(made: TreeRoom) -> list[Draft]:
    """Return the trees that a call has written."""
    every = zip(made.counts.tolist(), made.tokens.tolist(), made.parents.tolist(), strict=True)
    return [Draft(tokens[:count], parents=tuple(parents[:count])) for count, tokens, parents in every]
