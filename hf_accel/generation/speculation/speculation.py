"""Drafts of a pass: how many tokens, from whom, and what became of them."""

from __future__ import annotations

import sys
import time
import warnings
from collections import abc
from dataclasses import replace

from ...cache.pages import Pages
from ...errors import HfAccelError, HfAccelWarning
from ..sequence import Chunk, Draft, Sequence
from .controller import Controller
from .drafters.drafter import Drafter
from .statistics import SpeculationStatistics
from .verifiers.verifier import Verifier

NO_DRAFT = Draft()


class Speculation:
    """Drafters, the controller of how much each drafts, and the verifier of what they drafted.

    A sequence takes the draft of the first drafter that has one for it. Those that cost nothing go first, in the order
    given: after a model, which always has a proposal, they would never be asked. No drafters: plain decoding.

    invariant_rows: the most rows that the model rounds as it rounds one. Drafts do not take a pass beyond that, where
    verified tokens could differ from decoded ones; None for no such bound.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafters: abc.Sequence[Drafter] = (),
        controller: Controller | None = None,
        *,
        invariant_rows: int | None = None,
    ) -> None:
        self.verifier, self.invariant_rows = verifier, invariant_rows
        self.drafters = sorted(drafters, key=lambda drafter: not drafter.is_free)
        self.controller = controller or Controller()
        self.statistics = SpeculationStatistics()
        self._drafts: dict[Sequence, Draft] = {}
        self._seconds = 0.0  # of drafting, in this pass

    # -- before the pass -------------------------------------------------------------------------------

    def propose(self, chunks: abc.Sequence[Chunk], room: int | None, pages: Pages) -> list[list[int]]:
        """Drafted tokens for each chunk, with slots for them. room: tokens there may be in all."""
        self._drafts, self._seconds = {}, 0.0
        rows = sum(chunk.count for chunk in chunks)
        if self.invariant_rows is not None and rows <= self.invariant_rows:
            room = min(self.invariant_rows - rows, sys.maxsize if room is None else room)
        waiting = [chunk.sequence for chunk in chunks if chunk.sequence.decodes and chunk.sequence.num_left > 1]
        for drafter in self.drafters:
            if not waiting:
                break
            drafted = sum(map(len, self._drafts.values()))
            left = None if room is None else room - drafted
            self._ask(drafter, waiting, rows - len(waiting) + drafted, left, pages=pages)
            waiting = [sequence for sequence in waiting if sequence not in self._drafts]
        return [self.draft_of(chunk.sequence).tokens for chunk in chunks]

    def _ask(
        self, drafter: Drafter, sequences: list[Sequence], other_rows: int, room: int | None, *, pages: Pages
    ) -> None:
        lengths = self.controller.lengths(
            sequences,
            [sequence.num_left - 1 for sequence in sequences],
            other_rows=other_rows,
            is_free=drafter.is_free,
            source=drafter.name,
        )
        granted = reserve(sequences, lengths, room, pages)
        asked = [(sequence, count) for sequence, count in zip(sequences, granted, strict=True) if count]
        if not asked:
            return
        chosen = [sequence for sequence, _ in asked]
        begun = time.perf_counter()
        drafter.catch_up(chosen)
        ready = time.perf_counter()
        drafts = drafter.propose(chosen, [count for _, count in asked])
        ended = time.perf_counter()
        for (sequence, count), draft in zip(asked, drafts, strict=True):
            assert sequence.cached is not None
            if len(draft) > count:
                raise HfAccelError(
                    f"the drafter {drafter.name!r} proposed {len(draft)} tokens where {count} were asked for; "
                    "propose at most lengths[i]"
                )
            sequence.cached.truncate(sequence.num_computed + 1 + len(draft))
            if len(draft):
                self._drafts[sequence] = draft if draft.source else replace(draft, source=drafter.name)
        if not drafter.is_free:
            tokens = sum(map(len, drafts))
            self.controller.observe_drafting(tokens, max(map(len, drafts)), ended - ready, source=drafter.name)
        self._seconds += ended - begun

    def draft_of(self, sequence: Sequence) -> Draft:
        return self._drafts.get(sequence, NO_DRAFT)

    # -- after it --------------------------------------------------------------------------------------

    def observe(self, sequence: Sequence, accepted: int, tokens: int) -> None:
        """`accepted` of the sequence's drafted tokens were right; the pass brought it `tokens`."""
        if not self.drafters:
            return
        draft = self.draft_of(sequence)
        self.controller.observe_drafts(sequence, len(draft), accepted, source=draft.source or "")
        self.statistics.record_step(len(draft), accepted, tokens)

    def observe_pass(self, rows: int, seconds: float) -> None:
        """seconds: of the whole pass, drafting included."""
        if self.drafters:
            self.controller.observe_pass(rows, seconds - self._seconds)
            self.statistics.record_pass(self._seconds, seconds - self._seconds)

    def forget(self, sequence: Sequence) -> None:
        """Warns of what a drafter raises here: nobody is left whose error it could be."""
        for drafter in self.drafters:
            try:
                drafter.forget(sequence)
            except Exception as error:
                words = f"the drafter {drafter.name!r} raised {error!r} in forget(); it may hold memory for good"
                warnings.warn(words, HfAccelWarning, stacklevel=2)


def reserve(
    sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int], room: int | None, pages: Pages
) -> list[int]:
    """Slots for drafts as far as there are blocks, memory and budget: nobody is preempted, or fails, for them."""
    granted = []
    left = sum(lengths) if room is None else room
    for sequence, length in zip(sequences, lengths, strict=True):
        assert sequence.cached is not None
        start = sequence.num_computed
        count = pages.room(sequence.cached, max(0, min(length, left)), start=start)
        if count:
            try:
                pages.append(sequence.cached, count, start=start)
            except (MemoryError, RuntimeError):  # torch has no type of its own for memory that cannot be had
                count = 0
        granted.append(count)
        left -= count
    return granted
