"""One pass after the other over whatever sequences there are: decode, verification and prefill in the same call."""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from ..cache.pages import CachedSequence, Pages, TokenRange
from .runner import Runner
from .sampling.choice import Chosen, choose
from .sampling.logprobs import TokenLogprobs
from .scheduling.scheduler import Scheduler
from .sequence import Chunk, Sequence
from .speculation.speculation import Speculation


@dataclass(frozen=True)
class Progress:
    """What a pass brought a sequence: new tokens, their log-probabilities where asked for; error: why it failed."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: BaseException | None = None


class Batcher:
    """Sequences of any length and age over one model and its pages (continuous batching, Yu et al. 2022, Orca).

    A sequence's tokens do not depend on the others, as far as the model's kernels are row-invariant.
    """

    def __init__(
        self,
        runner: Runner,
        pages: Pages,
        speculation: Speculation,
        *,
        token_budget: int | None = None,
        max_running: int | None = None,
    ) -> None:
        self.runner, self.pages, self.speculation = runner, pages, speculation
        self.scheduler = Scheduler(pages, token_budget=token_budget, max_running=max_running)
        self.token_budget = token_budget
        self.num_passes = self.num_computed = self.peak_blocks = 0
        self.in_pass: list[Sequence] = []  # of the last pass, failed or not

    def add(self, sequence: Sequence, cached: CachedSequence | None = None) -> None:
        """cached: holds what is known of the sequence already.

        Raises OutOfBlocksError for a sequence that the pages could never hold.
        """
        if cached is None:
            self.scheduler.add(sequence)
        else:
            self.scheduler.enter(sequence, cached)

    def remove(self, sequence: Sequence, reason: str, error: BaseException | None = None) -> None:
        """End a sequence now: its blocks are free, and it is in no later pass."""
        self.scheduler.remove(sequence, reason, error)
        self.speculation.forget(sequence)

    def close(self) -> None:
        """End all that is under way."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self.remove(sequence, "cancelled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def isolate(self, sequences: abc.Sequence[Sequence]) -> None:
        """After a pass that failed: each of these gets passes of its own, before anybody goes on."""
        self.scheduler.isolate(sequences)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.no_grad()
    def step(self) -> list[Progress]:
        """One pass; what it brought each sequence that it brought something.

        After an exception of the model itself every sequence is as it was before the pass, but computed anew;
        those in `in_pass` were part of it. What a failure ended before may be left for take_failed().
        """
        self.in_pass = []
        start = time.perf_counter()
        try:
            chunks = self.scheduler.schedule()
            self.in_pass = [chunk.sequence for chunk in chunks]
            self.peak_blocks = max(self.peak_blocks, sum(group.pool.num_used for group in self.pages.groups))
            if not chunks:
                return self.take_failed()
            drafts = self.speculation.propose(chunks, self._room(chunks), self.pages)
            logits = self._forward(chunks, drafts)
            progress = self._choose(chunks, drafts, logits)
        except BaseException:
            self.scheduler.restart()
            for sequence in self.in_pass:
                self.speculation.forget(sequence)  # a draft model may count what it never computed
            raise
        rows = sum(chunk.count + len(draft) for chunk, draft in zip(chunks, drafts, strict=True))
        self.speculation.observe_pass(rows, time.perf_counter() - start)
        self.num_passes, self.num_computed = self.num_passes + 1, self.num_computed + rows
        return self.take_failed() + progress

    def _room(self, chunks: abc.Sequence[Chunk]) -> int | None:
        """Tokens of the budget that are left for drafts."""
        return None if self.token_budget is None else self.token_budget - sum(chunk.count for chunk in chunks)

    def take_failed(self) -> list[Progress]:
        """Sequences that the scheduler itself had to give up, since the last call."""
        failed = self.scheduler.take_failed()
        for sequence in failed:
            self.speculation.forget(sequence)
        return [Progress(s, [], error=s.error) for s in failed]

    def statistics(self) -> dict[str, int]:
        """Passes so far, tokens they computed, preemptions; blocks, and what was looked up and found."""
        return {
            "passes": self.num_passes,
            "computed_tokens": self.num_computed,
            "preemptions": self.scheduler.num_preempted,
            **self.pages.statistics(),
        }

    # -- the pass --------------------------------------------------------------------------------------

    def _forward(self, chunks: abc.Sequence[Chunk], drafts: abc.Sequence[list[int]]) -> Tensor:
        """Logits of every chunk that reaches its sequence's end: of its last token, and of each drafted one."""
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        ranges = []
        for chunk, draft in zip(chunks, drafts, strict=True):
            sequence, start = chunk.sequence, chunk.sequence.num_computed
            assert sequence.cached is not None
            count = chunk.count + len(draft)
            ids += sequence.tokens[start : start + chunk.count]
            ids += draft
            positions += range(start, start + count)
            ranges.append(TokenRange(sequence.cached, start, count))
            if chunk.reaches_end:
                keep += range(len(ids) - len(draft) - 1, len(ids))
        return self.runner(ids, positions, self.pages.step(ranges, self.runner.device), keep)

    def _choose(self, chunks: abc.Sequence[Chunk], drafts: abc.Sequence[list[int]], logits: Tensor) -> list[Progress]:
        ends = [(c.sequence, d) for c, d in zip(chunks, drafts, strict=True) if c.reaches_end]
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.count
        sequences, rows = self._with_followers([s for s, _ in ends], [len(d) + 1 for _, d in ends])
        if len(rows) != len(logits):
            logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        proposed = [self.speculation.draft_of(sequence) for sequence in sequences]
        chosen = choose(logits, sequences, proposed, self.speculation.verifier)
        return [self._commit(*pair) for pair in zip(sequences, chosen, strict=True)]

    def _with_followers(self, sequences: list[Sequence], counts: list[int]) -> tuple[list[Sequence], list[int]]:
        """Samples of one prompt begin from the same logits, each after its leader: sequences, and logits rows."""
        all_sequences: list[Sequence] = []
        rows: list[int] = []
        ends = list(accumulate(counts))
        for sequence, count, end in zip(sequences, counts, ends, strict=True):
            group = [sequence, *(self.scheduler.fork(sequence) if sequence.followers else [])]
            all_sequences += group
            rows += list(range(end - count, end)) * len(group)
        return all_sequences, rows

    def _commit(self, sequence: Sequence, chosen: Chosen | BaseException) -> Progress:
        """Once tokens of one sequence are final, no error of another may undo them."""
        error = chosen if isinstance(chosen, BaseException) else None
        if not isinstance(chosen, BaseException):
            try:
                return self._gain(sequence, chosen)
            except Exception as raised:
                error = raised
        self.remove(sequence, "error", error)
        return Progress(sequence, [], error=error)

    def _gain(self, sequence: Sequence, chosen: Chosen) -> Progress:
        tokens, reason, error = self._append(sequence, chosen)
        reports = chosen.logprobs and chosen.logprobs[: len(tokens)]
        if error is not None:
            self.remove(sequence, "error", error)
            return Progress(sequence, tokens, reports, error)
        self.speculation.observe(sequence, chosen.num_accepted, len(tokens))
        before, sequence.num_computed = sequence.num_computed, len(sequence.tokens) - 1
        assert sequence.cached is not None
        sequence.cached.truncate(sequence.num_computed)
        if sequence.num_computed // self.pages.block_size > (before - 1) // self.pages.block_size:
            self.pages.publish(sequence.cached, sequence.tokens[: sequence.num_computed])
        if reason is not None:
            if sequence.keeps:
                sequence.kept = sequence.cached.fork()
            self.remove(sequence, reason)
        return Progress(sequence, tokens, reports)

    @staticmethod
    def _append(sequence: Sequence, chosen: Chosen) -> tuple[list[int], str | None, BaseException | None]:
        """Tokens up to the first at which the sequence ends, and why it does; stops are looked for token by token.

        An error, of choosing or of the user's own rule for stopping, takes the token that it belongs to; so does what
        is no Exception, as others have gained theirs: who runs the passes raises it, or tells it to its owner.
        """
        tokens = chosen.tokens
        for number, token in enumerate(tokens, start=1):
            sequence.tokens.append(token)
            try:
                reason = sequence.stop(sequence) if sequence.stop is not None else None
            except BaseException as error:
                sequence.tokens.pop()
                return tokens[: number - 1], None, error
            if reason is None and sequence.num_left <= 0:
                reason = "length"
            if reason is not None:
                return tokens[:number], reason, None
        return tokens, None, chosen.error
