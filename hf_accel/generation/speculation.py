"""Drafts of a pass: how many tokens, from whom, and what became of them."""

from __future__ import annotations

import time
from collections import abc

from ..cache.rows import Pages
from .acceptance.base import Verifier
from .controller import Controller
from .drafters.base import Draft, Drafter
from .sequence import Chunk, Sequence
from .statistics import SpeculationStatistics

NO_DRAFT = Draft()


class Speculation:
    """A drafter with the controller of its lengths and the verifier of its drafts; without a drafter, none of it."""

    def __init__(self, verifier: Verifier, drafter: Drafter | None = None, controller: Controller | None = None) -> None:
        self.verifier, self.drafter, self.controller = verifier, drafter, controller
        self.statistics = SpeculationStatistics()
        self._drafts: dict[Sequence, Draft] = {}

    def propose(self, chunks: abc.Sequence[Chunk], room: int | None, pages: Pages) -> list[list[int]]:
        """Drafted tokens for each chunk, with slots for them in its row. room: tokens there may be in all."""
        self._drafts = {}
        decoding = [chunk.sequence for chunk in chunks if chunk.sequence.decodes and chunk.sequence.num_left > 1]
        if self.drafter is None or self.controller is None or not decoding:
            return [[] for _ in chunks]
        others = sum(chunk.count for chunk in chunks) - len(decoding)
        limits = [sequence.num_left - 1 for sequence in decoding]
        lengths = self.controller.lengths(decoding, limits, other_rows=others, is_free=self.drafter.is_free)
        wanted = [(s, k) for s, k in zip(decoding, self._reserve(decoding, lengths, room, pages), strict=True) if k]
        if wanted:
            self._draft([s for s, _ in wanted], [k for _, k in wanted])
        return [self.draft_of(chunk.sequence).tokens for chunk in chunks]

    @staticmethod
    def _reserve(sequences: list[Sequence], lengths: list[int], room: int | None, pages: Pages) -> list[int]:
        """Slots for drafts as far as there are blocks and budget: nobody is preempted for them."""
        granted = []
        left = sum(lengths) if room is None else room
        for sequence, length in zip(sequences, lengths, strict=True):
            assert sequence.row is not None
            count = min(length, left)
            while count and not pages.can_append(sequence.row, count):
                count -= 1
            if count:
                pages.append(sequence.row, count)
            granted.append(count)
            left -= count
        return granted

    def _draft(self, sequences: list[Sequence], lengths: list[int]) -> None:
        assert self.drafter is not None and self.controller is not None
        start = time.perf_counter()
        drafts = self.drafter.propose(sequences, lengths)
        seconds = time.perf_counter() - start
        for sequence, draft in zip(sequences, drafts, strict=True):
            assert sequence.row is not None
            sequence.row.truncate(sequence.num_computed + 1 + len(draft))
            self._drafts[sequence] = draft
        self.controller.observe_drafting(sum(map(len, drafts)), max(map(len, drafts)), seconds)
        self.statistics.draft_seconds += seconds

    def draft_of(self, sequence: Sequence) -> Draft:
        return self._drafts.get(sequence, NO_DRAFT)

    def observe(self, sequence: Sequence, accepted: int) -> None:
        """A draft was verified, and so many of its tokens were right."""
        drafted = len(self.draft_of(sequence))
        if self.controller is not None:
            self.controller.observe_drafts(sequence, drafted, accepted)
            self.statistics.observe(drafted, accepted)

    def observe_pass(self, rows: int, seconds: float, *, decodes: bool) -> None:
        if self.controller is not None and decodes:
            self.controller.observe_pass(rows, seconds)

    def forget(self, sequence: Sequence) -> None:
        if self.drafter is not None:
            self.drafter.forget(sequence)
