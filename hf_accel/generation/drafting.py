"""Before a pass: who drafts, and how much. After it: what that taught the controller."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from dataclasses import replace

from .controller import Controller
from .drafters.base import Draft, Drafter
from .drafters.cascade import Cascade
from .sequence import Sequence
from .statistics import SpeculationStatistics


class Drafting:
    """A drafter, or each drafter of a cascade, under a controller that judges each apart: a looked-up token costs a
    row, a model's token a pass of that model too.

    statistics: of all passes observed so far. clock: seconds.
    """

    def __init__(
        self, drafter: Drafter, controller: Controller, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.drafter, self.controller = drafter, controller
        self.sources = drafter.drafters if isinstance(drafter, Cascade) else [drafter]
        self.statistics = SpeculationStatistics()
        self._clock = clock
        self._seconds = 0.0

    def propose(
        self, sequences: abc.Sequence[Sequence], limits: abc.Sequence[int], other_rows: int = 0
    ) -> list[Draft]:
        """A Draft for each of the decoding sequences, of at most limits[i] tokens. other_rows: of the pass to come,
        those of other sequences."""
        drafts = [Draft() for _ in sequences]
        waiting = list(range(len(sequences)))
        for drafter in self.sources:
            if not waiting:
                break
            drafted = sum(map(len, drafts)) + len(sequences) - len(waiting)
            lengths = self.controller.lengths(
                [sequences[i] for i in waiting],
                [limits[i] for i in waiting],
                other_rows=other_rows + drafted,
                is_free=drafter.is_free,
                source=drafter.name,
            )
            asked = [(i, length) for i, length in zip(waiting, lengths, strict=True) if length > 0]
            for (i, _), draft in zip(asked, self._ask(drafter, sequences, asked), strict=True):
                drafts[i] = replace(draft, source=drafter.name)
            waiting = [i for i in waiting if not drafts[i].tokens]
        return drafts

    def _ask(self, drafter: Drafter, sequences: abc.Sequence[Sequence], asked: list[tuple[int, int]]) -> list[Draft]:
        if not asked:
            return []
        chosen = [sequences[i] for i, _ in asked]
        begun = self._clock()
        drafter.catch_up(chosen)
        ready = self._clock()
        drafts = drafter.propose(chosen, [length for _, length in asked])
        ended = self._clock()
        self._seconds += ended - begun
        if not drafter.is_free:
            tokens, passes = sum(map(len, drafts)), max(map(len, drafts))
            self.controller.observe_drafting(tokens, passes, ended - ready, source=drafter.name)
        return drafts

    def observe(
        self,
        sequences: abc.Sequence[Sequence],
        drafts: abc.Sequence[Draft],
        accepted: abc.Sequence[int],
        *,
        rows: int,
        seconds: float,
    ) -> None:
        """Of each draft the first accepted[i] tokens were right, in a pass over `rows` rows that took `seconds`."""
        for sequence, draft, right in zip(sequences, drafts, accepted, strict=True):
            self.controller.observe_drafts(sequence, len(draft), right, source=draft.source)
            self.statistics.record_step(len(draft), right)
        self.controller.observe_pass(rows, seconds)
        self.statistics.record_pass(drafting_seconds=self._seconds, verifying_seconds=seconds)
        self._seconds = 0.0

    def forget(self, sequence: Sequence) -> None:
        self.drafter.forget(sequence)
