"""The drafts of a pass: drafters propose them, and the results of their verification are recorded."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ...cache.pages import Pages
from ...errors import HfAccelError, HfAccelWarning
from ..agreement import ALONE, ProcessAgreement
from ..sequence import NO_DRAFT, Chunk, Draft, Sequence
from .acceptance import Tally
from .controller import Controller
from .drafters.drafter import Drafter
from .verifiers.verifier import Verifier


@dataclass
class SpeculationStatistics:
    """Counts over all sequences that decoded in a run.

    steps: decoding steps of single sequences, with or without a draft. A step gives the accepted tokens and one more.
    passes: passes of the model. tokens: new tokens. lengths: the number of steps with a draft of each length.
    """

    steps: int = 0
    passes: int = 0
    tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)
    drafting_seconds: float = 0.0
    verifying_seconds: float = 0.0

    def record_step(self, drafted: int, accepted: int, tokens: int) -> None:
        """Record a decoding step of one sequence. tokens: its new ones: accepted + 1, or fewer if it has ended."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} tokens accepted of {drafted} drafted")
        self.steps += 1
        self.tokens += tokens
        self.lengths[drafted] += 1
        self.tally.add(drafted, accepted)

    def record_pass(self, drafting_seconds: float, verifying_seconds: float) -> None:
        self.passes += 1
        self.drafting_seconds += drafting_seconds
        self.verifying_seconds += verifying_seconds

    @property
    def drafted(self) -> int:
        return int(sum(self.tally.drafted))

    @property
    def accepted(self) -> int:
        return int(sum(self.tally.accepted))

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that can be written as JSON. Values that no step or draft defines yet are None.

        acceptance_at: by position, the accepted of the drafted tokens; those after a rejected one count as drafted.
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
        self.states: Callable[[], Tensor] | None = None  # returns the hidden states of the last pass, [N, D]
        self._drafts: dict[Sequence, Draft] = {}
        self._seconds = 0.0  # the time of all that is done for drafts before the pass

    # -- before the pass -------------------------------------------------------------------------------

    def propose(self, chunks: abc.Sequence[Chunk], room: int | None, pages: Pages) -> list[Draft]:
        """Draft tokens for each chunk and allocate their slots. room: the most drafted tokens of the pass, or None."""
        self._drafts, self._seconds = {}, 0.0
        begun = time.perf_counter()
        rows = sum(chunk.count for chunk in chunks)
        if self.invariant_rows is not None and rows <= self.invariant_rows:
            room = min(self.invariant_rows - rows, sys.maxsize if room is None else room)
        waiting = [
            chunk.sequence
            for chunk in chunks
            if chunk.sequence.decodes and chunk.sequence.num_left > 1 and chunk.sequence.sampling.takes_drafts
        ]
        for drafter in self.drafters:
            if not waiting:
                break
            drafted = sum(map(len, self._drafts.values()))
            left = None if room is None else room - drafted
            self._propose_from(drafter, waiting, rows - len(waiting) + drafted, left, pages=pages)
            waiting = [sequence for sequence in waiting if sequence not in self._drafts]
        seconds = time.perf_counter() - begun
        self.controller.observe_asking([], seconds - self._seconds)
        self._seconds = seconds
        return [self.draft_of(chunk.sequence) for chunk in chunks]

    def _propose_from(
        self, drafter: Drafter, sequences: list[Sequence], other_rows: int, room: int | None, *, pages: Pages
    ) -> None:
        lengths = self.controller.lengths(
            sequences,
            [sequence.num_left - 1 for sequence in sequences],
            other_rows=other_rows,
            is_free=drafter.is_free,
            source=drafter.name,
        )
        lengths = self.agreement.agree(lengths)  # which measured time decides
        if not any(lengths):
            return
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
            draft = draft if self.num_tokens is None else draft.below(self.num_tokens)
            sequence.cached.truncate(sequence.num_computed + 1 + len(draft))
            if len(draft):
                self._drafts[sequence] = draft if draft.source else replace(draft, source=drafter.name)
        passes = 0.0 if drafter.is_free else ended - ready
        if passes:
            tokens = sum(map(len, drafts))
            self.controller.observe_drafting(tokens, max(map(len, drafts)), passes, source=drafter.name)
        self.controller.observe_asking(chosen, ended - begun - passes, source=drafter.name)
        self._seconds += ended - begun

    def draft_of(self, sequence: Sequence) -> Draft:
        return self._drafts.get(sequence, NO_DRAFT)

    def watch(self, chunks: abc.Sequence[Chunk], drafts: abc.Sequence[Draft]) -> None:
        """Give the drafter that reads them the hidden states of a pass, which the model has just computed."""
        if self.states is None:
            return
        states, end = self.states(), 0
        for chunk, draft in zip(chunks, drafts, strict=True):
            first, end = end, end + chunk.count + len(draft)
            for drafter in self.drafters:
                if drafter.layers and chunk.sequence.sampling.takes_drafts:
                    drafter.watch(chunk.sequence, chunk.sequence.num_computed, states[first:end])

    # -- after the pass --------------------------------------------------------------------------------

    def observe(self, sequence: Sequence, accepted: int, tokens: int) -> None:
        """Record that `accepted` drafted tokens of a sequence were accepted, and that it has `tokens` new tokens."""
        draft = self.draft_of(sequence)
        self.controller.observe_drafts(sequence, len(draft), accepted, source=draft.source or "")
        self.statistics.record_step(len(draft), accepted, tokens)

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Record a pass over `rows` rows. seconds: the time of the whole pass, drafting included."""
        self.controller.observe_pass(rows, seconds - self._seconds)
        self.statistics.record_pass(self._seconds, seconds - self._seconds)

    def forget(self, sequence: Sequence) -> None:
        """Free what the drafters hold for a sequence that has ended.

        If a drafter raises an error, this warns, because the error belongs to no sequence that still runs.
        """
        for drafter in self.drafters:
            try:
                drafter.forget(sequence)
            except Exception as error:
                words = f"the drafter {drafter.name!r} raised {error!r} in forget(); it may hold memory for good"
                warnings.warn(words, HfAccelWarning, stacklevel=2)


def reserve(
    sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int], room: int | None, pages: Pages
) -> list[int]:
    """Allocate slots for drafts, and return their numbers: at most lengths[i] for each sequence, and `room` in all.

    There are fewer if blocks or memory run out. No sequence is preempted, and none fails, for a draft.
    """
    granted = []
    left = sum(lengths) if room is None else room
    for sequence, length in zip(sequences, lengths, strict=True):
        assert sequence.cached is not None
        start = sequence.num_computed
        count = pages.room(sequence.cached, max(0, min(length, left)), start=start)
        if count:
            try:
                pages.append(sequence.cached, count, start=start)
            except (MemoryError, RuntimeError):  # torch raises RuntimeError when it cannot allocate memory
                count = 0
        granted.append(count)
        left -= count
    return granted
