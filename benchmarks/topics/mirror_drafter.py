"""A draft model that drafts the next round in a thread, while the target verifies this one.

After each draft it guesses the whole verdict: all drafted tokens are accepted, and the model's own token after them is
the one that the draft model would choose. From there it drafts the next round. If the verdict is another, this is
thrown away and drafted again (PEARL, arXiv 2408.11850; Mirror-SD, arXiv 2510.13161, across devices).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from hf_accel import Draft
from hf_accel.errors import HfAccelError
from hf_accel.generation.sampling.choice import argmax, processed
from hf_accel.generation.sequence import Sequence as Generated
from hf_accel.generation.speculation.drafters.model import ModelDrafter, PartialDraft

TIMEOUT = 60.0  # seconds to wait for the end of a pass of the draft model
THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class Split:
    """The threads of the target and of the draft. cores: those of the target, then those of the draft; none: the
    system chooses for each thread."""

    target: int
    draft: int
    cores: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.target}+{self.draft}{'' if self.cores else ' shared'}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give all threads that the process has now, which are the target's, their number and their cores."""
        threads, cores = torch.get_num_threads(), os.sched_getaffinity(0) if self.cores else set()
        torch.set_num_threads(self.target)
        pin(self.cores[: self.target])
        try:
            yield
        finally:
            pin(cores)
            torch.set_num_threads(threads)

    def enter_draft(self) -> None:
        """Give the calling thread, and the OpenMP threads that it starts later, those of the draft."""
        torch.set_num_threads(self.draft)  # of the calling thread alone, as OpenMP has it
        if self.cores:
            os.sched_setaffinity(0, self.cores[self.target :])


def pin(cores: Sequence[int] | set[int]) -> None:
    """Let the threads that the process has now run on these cores alone; on no cores: leave them as they are."""
    for thread in THREADS.iterdir() if cores else ():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), cores)


@dataclass(frozen=True)
class Ahead:
    """A draft from a guessed verdict. num_final: how many final tokens of the sequence the draft model has computed.

    draft.sequence is a copy whose tokens are those of the sequence, its draft, and the guessed token after it.
    """

    draft: PartialDraft
    num_final: int

    @property
    def tokens(self) -> list[int]:
        return self.draft.sequence.tokens


class MirrorDrafter(ModelDrafter):
    """Proposes what its parent proposes, token by token and distribution by distribution, but may have it earlier.

    rounds: drafts that were asked for where there was one ahead; hits: those of them whose guess was right. Call
    close() at the end.
    """

    name = "mirror"

    def __init__(self, *parts: Any, split: Split, **keywords: Any) -> None:
        super().__init__(*parts, **keywords)
        self.rounds = self.hits = 0
        self._ahead: dict[Generated, Ahead] = {}
        self._verdict = Event()  # is set when the thread shall end after its pass
        self._running: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "mirror", initializer=split.enter_draft)

    def close(self) -> None:
        """End the thread."""
        self._settle()
        self._thread.shutdown()

    def catch_up(self, sequences: Sequence[Generated]) -> None:
        self._settle()
        super().catch_up([sequence for sequence in sequences if not self._is_right(sequence)])

    def propose(self, sequences: Sequence[Generated], lengths: Sequence[int]) -> list[Draft]:
        self.catch_up(sequences)
        drafts = [self._begun(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]
        for number in range(max(lengths, default=0)):
            self._draft_one([draft for draft in drafts if len(draft.tokens) == number < draft.length])
        self._begin_ahead(drafts)
        return [Draft(list(draft.tokens), draft.distribution) for draft in drafts]

    def forget(self, sequence: Generated) -> None:
        self._settle()
        self._ahead.pop(sequence, None)
        super().forget(sequence)

    # -- after the verdict -----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for the end of the thread's pass, and count what it has computed as drafted tokens."""
        running, self._running = self._running, None
        if running is None:
            return
        self._verdict.set()
        try:
            running.result(TIMEOUT)
        except Exception as error:
            for sequence in list(self._ahead):
                del self._ahead[sequence]
                super().forget(sequence)
            raise HfAccelError(f"the draft model failed while it drafted ahead: {error!r}") from error
        finally:
            self._verdict.clear()
        for ahead in self._ahead.values():
            past = ahead.draft.past
            computed = [*ahead.tokens, *ahead.draft.tokens][: past.count]
            past.final, past.drafted = ahead.num_final, computed[ahead.num_final :]

    def _is_right(self, sequence: Generated) -> bool:
        ahead = self._ahead.get(sequence)
        return ahead is not None and ahead.tokens == sequence.tokens

    def _begun(self, sequence: Generated, length: int) -> PartialDraft:
        """The draft that was begun ahead, cut to `length`, or an empty one."""
        is_right, ahead = self._is_right(sequence), self._ahead.pop(sequence, None)
        if ahead is None:
            return PartialDraft(sequence, self._past(sequence), length)
        self.rounds, self.hits = self.rounds + 1, self.hits + is_right
        if not is_right:
            return PartialDraft(sequence, self._past(sequence), length)
        draft, past = ahead.draft, ahead.draft.past
        computed = [*past.drafted][: len(sequence.tokens) - past.final + max(0, length - 1)]
        num_final = min(len(computed), len(sequence.tokens) - past.final)
        past.final, past.drafted = past.final + num_final, computed[num_final:]
        past.cached.truncate(past.count)
        return PartialDraft(sequence, past, length, draft.tokens[:length], draft.distributions[:length])

    # -- drafting --------------------------------------------------------------------------------------

    def _draft_one(self, drafts: list[PartialDraft]) -> None:
        if drafts:
            logits = self._over_target_vocabulary(self._pass(drafts, [draft.missing for draft in drafts]))
            _, tokens = self._next_tokens(drafts, logits)
            for draft, token in zip(drafts, tokens.read(), strict=True):
                draft.tokens.append(token)

    def _begin_ahead(self, drafts: list[PartialDraft]) -> None:
        """Start the thread on all drafts after which another one may be asked for."""
        self._ahead.clear()
        for draft in drafts:
            left = draft.sequence.num_left - len(draft.tokens) - 2  # the verdict's own token, and the next verdict's
            if draft.tokens and left > 0:
                guessed = copy.copy(draft.sequence)
                guessed.tokens, guessed.notes = [*draft.sequence.tokens, *draft.tokens], {}
                ahead = PartialDraft(guessed, draft.past, min(draft.length, left))
                self._ahead[draft.sequence] = Ahead(ahead, draft.past.final)
        if self._ahead:
            self._running = self._thread.submit(self._draft_ahead, [ahead.draft for ahead in self._ahead.values()])

    @torch.no_grad()
    def _draft_ahead(self, drafts: list[PartialDraft]) -> None:
        """In the thread: guess the token after each draft, and draft from there until the verdict is known."""
        logits = self._pass(drafts, [draft.missing for draft in drafts])
        for draft, token in zip(drafts, self._guess(drafts, logits), strict=True):
            draft.sequence.tokens.append(token)
        for number in range(max(draft.length for draft in drafts)):
            if self._verdict.is_set():
                return
            self._draft_one([draft for draft in drafts if draft.length > number])

    def _guess(self, drafts: list[PartialDraft], logits: Tensor) -> list[int]:
        """The target's own tokens after whole drafts, if it had these logits: with its random numbers."""
        logits = self._over_target_vocabulary(logits)
        if all(draft.sequence.sampling.plain for draft in drafts):
            return [int(token) for token in argmax(logits)]
        distributions = processed(logits, [(draft.sequence, []) for draft in drafts])
        chosen = self.verifier.verify(distributions, [Draft()] * len(drafts), [draft.place for draft in drafts])
        return [tokens[0] for tokens in chosen]
