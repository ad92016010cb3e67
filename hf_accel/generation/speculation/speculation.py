"""The drafts of a pass: drafters propose them, and the results of their verification are recorded."""

from __future__ import annotations

import sys
import warnings
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ...cache.pages import Pages
from ...errors import HfAccelWarning
from ...fused.state_rows import StateRows
from ..agreement import ALONE, ProcessAgreement
from ..sequence import NO_DRAFT, Chunk, Draft, Sequence, Shape
from .acceptance import Tally
from .controller import Controller
from .costs import now
from .drafters.drafter import Drafter
from .trees import Fork, first_branch, fork_branches, in_branches
from .verifiers.verifier import Verifier


@dataclass
class SpeculationStatistics:
    """Counts over all sequences that decoded in a run.

    steps: decoding steps of single sequences, with or without a draft. A step gives the accepted tokens and one more.
    passes: passes of the model. tokens: new tokens. lengths: the number of steps with a draft of each length.
    branched: the steps that went on with another branch of a tree than its first. no_trees: why drafters that propose
    trees are asked for chains, as a clause; None if they are not.
    """

    steps: int = 0
    passes: int = 0
    tokens: int = 0
    branched: int = 0
    no_trees: str | None = None
    lengths: Counter[int] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)
    drafting_seconds: float = 0.0
    verifying_seconds: float = 0.0

    def record_step(self, drafted: int, accepted: int, tokens: int, *, levels: int | None = None) -> None:
        """Record a decoding step of one sequence. tokens: its new ones: accepted + 1, or fewer if it has ended.

        levels: how many of the drafted tokens follow each other at most; None for all of them.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} tokens accepted of {drafted} drafted")
        self.steps += 1
        self.tokens += tokens
        self.lengths[drafted] += 1
        if drafted:
            self.tally.add(drafted if levels is None else levels, accepted)

    def record_pass(self, drafting_seconds: float, verifying_seconds: float) -> None:
        self.passes += 1
        self.drafting_seconds += drafting_seconds
        self.verifying_seconds += verifying_seconds

    @property
    def drafted(self) -> int:
        return sum(length * count for length, count in self.lengths.items())

    @property
    def accepted(self) -> int:
        return int(sum(self.tally.accepted))

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that can be written as JSON. Values that no step or draft defines yet are None.

        acceptance_at: by position, the accepted of the drafted tokens; those after a rejected one count as drafted. A
        tree counts as one token at each depth.
        """
        drafted, accepted = self.tally.drafted, self.tally.accepted
        return {
            "passes": self.passes,
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_pass": self.tokens / self.steps if self.steps else None,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": self.accepted / self.drafted if drafted else None,
            "drafted_at": list(drafted),
            "accepted_at": list(accepted),
            "acceptance_at": [a / d for a, d in zip(accepted, drafted, strict=True)],
            "branched": self.branched,
            "no_trees": self.no_trees,
            "draft_lengths": {str(length): self.lengths[length] for length in sorted(self.lengths)},
            "drafting_seconds": self.drafting_seconds,
            "verifying_seconds": self.verifying_seconds,
        }


class Speculation:
    """Drafters, a controller that chooses draft lengths, and a verifier.

    A sequence gets the draft of the first drafter that proposes one. Free drafters go first, in the order given,
    because a draft model always proposes a draft.

    invariant_rows: the largest number of rows for which the model rounds each row as it rounds a single one; None for
    any number. In a larger pass, verified tokens could differ from decoded ones. So drafts do not make a pass larger
    than that. num_tokens: the tokens that the model may say, of which alone a draft is made; None for any.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafters: abc.Sequence[Drafter],
        controller: Controller | None = None,
        *,
        invariant_rows: int | None = None,
        agreement: ProcessAgreement = ALONE,
        num_tokens: int | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self.verifier, self.invariant_rows, self.agreement = verifier, invariant_rows, agreement
        self.drafters = sorted(drafters, key=lambda drafter: not drafter.is_free)
        self.controller = controller or Controller()
        self.statistics = SpeculationStatistics()
        self.states: Callable[[], StateRows] | None = None  # returns the hidden states of the last pass
        self.keep_states: Callable[[bool], None] = lambda wanted: None  # says whether the next passes keep them
        self._keeps = True
        self._drafts: dict[Sequence, Draft] = {}
        self._forks: dict[Sequence, list[Fork]] = {}
        self._states: dict[Sequence, tuple[int, StateRows]] = {}  # of trees, from the first row on
        self._begun = 0.0  # when the pass began
        self._seconds = 0.0  # the time of all that is done for drafts before the pass, besides choosing their lengths

    def leave_trees(self, why: str | None) -> None:
        """Ask drafters for chains if the model cannot verify trees. why: the reason, as a clause; None if it can."""
        self.statistics.no_trees = why if any(drafter.trees for drafter in self.drafters) else None

    # -- before the pass -------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        self._begun = now()

    def propose(self, chunks: abc.Sequence[Chunk], room: int | None, pages: Pages) -> list[Draft]:
        """Draft tokens for each chunk and allocate their slots. room: the most drafted tokens of the pass, or None."""
        self._drafts, self._states, self._seconds = {}, {}, 0.0
        is_alone = self.agreement.size == 1  # or the clock of each process would say when drafters rest
        if self.states is not None:
            resting = (self.controller.rests(drafter.name) for drafter in self.drafters if drafter.layers)
            self._keeps = not (is_alone and all(resting))
            self.keep_states(self._keeps)
        if is_alone and all(self.controller.rests(drafter.name, 0, count=len(chunks)) for drafter in self.drafters):
            return [NO_DRAFT] * len(chunks)
        rows = sum(chunk.count for chunk in chunks)
        if self.invariant_rows is not None and rows <= self.invariant_rows:
            room = min(self.invariant_rows - rows, sys.maxsize if room is None else room)
        waiting = [
            chunk.sequence
            for chunk in chunks
            if chunk.sequence.decodes and chunk.sequence.num_left > 1 and chunk.sequence.settings.sampling.takes_drafts
        ]
        for drafter in self.drafters:
            if not waiting:
                break
            drafted = sum(map(len, self._drafts.values()))
            left = None if room is None else room - drafted
            asked = [sequence for sequence in waiting if drafter.drafts_for(sequence)]
            if asked:
                self._propose_from(drafter, asked, rows - len(asked) + drafted, left, pages=pages)
            waiting = [sequence for sequence in waiting if sequence not in self._drafts]
        return [self.draft_of(chunk.sequence) for chunk in chunks]

    def _propose_from(
        self, drafter: Drafter, sequences: list[Sequence], other_rows: int, room: int | None, *, pages: Pages
    ) -> None:
        trees = self.statistics.no_trees is None and self.controller.max_nodes > 1 and drafter.drafts_trees(sequences)
        begun = now()
        self.controller.expect(drafter.expected, source=drafter.name)
        shapes = self.controller.shapes(
            sequences,
            [sequence.num_left - 1 for sequence in sequences],
            other_rows=other_rows,
            is_free=drafter.is_free,
            source=drafter.name,
            room=room,
            trees=trees,
        )
        self.controller.observe_keeping(now() - begun, source=drafter.name)
        if self.agreement.size > 1:  # measured time decides
            shapes = [Shape(*shape) for shape in self.agreement.agree(shapes)]
        if not any(shape.nodes for shape in shapes):
            return
        granted = reserve(sequences, shapes, room, pages)
        asked = [(sequence, shape) for sequence, shape in zip(sequences, granted, strict=True) if shape.nodes]
        if not asked:
            return
        chosen = [sequence for sequence, _ in asked]
        begun = now()
        drafter.catch_up(chosen)
        ready = now()
        if trees:
            drafts = drafter.propose_trees(chosen, [shape for _, shape in asked])
        else:
            drafts = drafter.propose(chosen, [shape.depth for _, shape in asked])
        for (sequence, shape), draft in zip(asked, drafts, strict=True):
            self._take(drafter, sequence, in_branches(draft, shape, drafter.name), pages)
        ended = now()
        # A drafter that is free reads a text when it is first asked for a draft.
        read = (ended if drafter.is_free else ready) - begun
        read = self.controller.observe_reading(chosen, read, source=drafter.name)
        if drafter.is_free:
            levels, tokens = max(shape.depth for _, shape in asked), sum(shape.nodes for _, shape in asked)
        else:
            levels, tokens = max(draft.num_levels for draft in drafts), sum(map(len, drafts))
        if ended - begun > read:
            self.controller.observe_drafting(tokens, levels, ended - begun - read, source=drafter.name)
        self._seconds += ended - begun

    def _take(self, drafter: Drafter, sequence: Sequence, draft: Draft, pages: Pages) -> None:
        """Give the draft of a sequence its slots, or what there are slots for. Those of its first branch are there."""
        assert sequence.cached is not None
        draft = draft if self.num_tokens is None else draft.below(self.num_tokens)
        draft = _allowed(sequence, draft)
        end = sequence.num_computed + 1 + first_branch(draft)
        if end != sequence.cached.num_tokens:
            sequence.cached.truncate(end)
        if not draft.tokens:
            return
        draft, forks = fork_branches(sequence.cached, draft, sequence.num_computed, pages)
        self._drafts[sequence] = draft if draft.source else replace(draft, source=drafter.name)
        if forks:
            self._forks[sequence] = forks

    def forks_of(self, sequence: Sequence) -> list[Fork]:
        """Return the branches of a sequence's draft that have blocks of their own."""
        return self._forks.get(sequence, [])

    def draft_of(self, sequence: Sequence) -> Draft:
        return self._drafts.get(sequence, NO_DRAFT)

    def watch(self, chunks: abc.Sequence[Chunk], drafts: abc.Sequence[Draft]) -> None:
        """Give the drafter that reads them the hidden states of a pass, which the model has just computed."""
        if self.states is None or not self._keeps:
            return
        begun = now()
        states, end = self.states(), 0
        for chunk, draft in zip(chunks, drafts, strict=True):
            sequence = chunk.sequence
            first, end = end, end + chunk.count + len(draft.tokens)
            if sequence in self._forks:
                self._states[sequence] = sequence.num_computed, states.part(first, end - first)
            self._show(sequence, sequence.num_computed, states.part(first, chunk.count + first_branch(draft)))
        for drafter in self.drafters:
            if drafter.layers:
                self.controller.observe_keeping(now() - begun, source=drafter.name)

    def _show(self, sequence: Sequence, start: int, states: StateRows) -> None:
        for drafter in self.drafters:
            if drafter.layers and sequence.settings.sampling.takes_drafts:
                drafter.watch_rows(sequence, start, states)

    def _watch_again(self, sequence: Sequence, rows: list[int]) -> None:
        """Show the states of the branch that was taken, where those of the first one were shown."""
        start, states = self._states.pop(sequence, (0, None))
        if states is not None:
            for number, row in enumerate(rows):
                self._show(sequence, start + number, states.part(row, 1))

    # -- after the pass --------------------------------------------------------------------------------

    def observe(self, sequence: Sequence, accepted: list[int], tokens: int) -> None:
        """Record which drafted tokens of a sequence were accepted, and that it has `tokens` new tokens."""
        draft = self.draft_of(sequence)
        if draft.parents is None:
            self.controller.observe_drafts(sequence, len(draft), len(accepted), source=draft.source)
        else:
            self.controller.observe_tree(sequence, draft, draft.rows(accepted), source=draft.source)
        self.statistics.record_step(len(draft), len(accepted), tokens, levels=draft.num_levels)

    def settle(self, sequence: Sequence, tokens: list[int]) -> None:
        """Let a sequence go on with the blocks of the branch that it took. tokens: its new ones."""
        forks = self._forks.get(sequence)
        if forks is None:
            return
        rows = self.draft_of(sequence).rows(tokens[:-1])
        taken = next((fork for fork in forks if rows[-1] in fork.rows), None)
        if taken is not None and sequence.cached is not None:
            sequence.cached.take(taken.cached)
            self.statistics.branched += 1
            self._watch_again(sequence, rows)
        self._drop_forks(sequence)

    def _drop_forks(self, sequence: Sequence) -> None:
        for fork in self._forks.pop(sequence, ()):
            fork.cached.release()

    def observe_pass(self, rows: int) -> None:
        """Record the pass that began with `begin_pass`, over `rows` rows."""
        seconds = now() - self._begun
        self.controller.observe_pass(rows, seconds - self._seconds)
        self.statistics.record_pass(self._seconds, seconds - self._seconds)

    def forget(self, sequence: Sequence) -> None:
        """Free what the drafters hold for a sequence that has ended.

        If a drafter raises an error, this warns, because the error belongs to no sequence that still runs.
        """
        self._drop_forks(sequence)
        for drafter in self.drafters:
            try:
                drafter.forget(sequence)
            except Exception as error:
                words = f"the drafter {drafter.name!r} raised {error!r} in forget(); it may hold memory for good"
                warnings.warn(words, HfAccelWarning, stacklevel=2)


def _allowed(sequence: Sequence, draft: Draft) -> Draft:
    """Return the draft up to its first token that the sequence's constraint does not allow.

    One whose tokens were drawn is left as it is: they were drawn among those that are allowed. So is a tree.
    """
    if sequence.constraint is None or draft.probabilities is not None or draft.parents is not None:
        return draft
    new = sequence.tokens[sequence.num_prompt :]
    count = sequence.constraint.follow([*new, *draft.tokens]) - len(new)
    return draft if count == len(draft) else Draft(draft.tokens[: max(0, count)], source=draft.source)


def reserve(
    sequences: abc.Sequence[Sequence], shapes: abc.Sequence[Shape], room: int | None, pages: Pages
) -> list[Shape]:
    """Allocate slots for a branch of each draft. Returns the shapes: at most shapes[i], and `room` tokens in all.

    There are fewer if blocks or memory run out. No sequence is preempted, and none fails, for a draft.
    """
    granted = []
    left = sum(shape.nodes for shape in shapes) if room is None else room
    for sequence, shape in zip(sequences, shapes, strict=True):
        assert sequence.cached is not None
        start, count = sequence.num_computed, max(0, min(shape.depth, left))
        if count and not pages.fill(sequence.cached, count):
            try:
                if count := pages.room(sequence.cached, count, start=start):
                    pages.append(sequence.cached, count, start=start)
            except (MemoryError, RuntimeError):  # torch raises RuntimeError when it cannot allocate memory
                count = 0
        granted.append(Shape(count, min(shape.nodes, left) if count else 0))
        left -= granted[-1].nodes
    return granted
