"""The batcher runs passes over many sequences. One pass may hold prefill, decoding and verification of drafts."""

from __future__ import annotations

import warnings
from collections import abc
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from ..cache.cached_sequence import CachedSequence
from ..cache.pages import Pages
from ..cache.step import Step, TokenRange
from ..errors import HfAccelError, HfAccelWarning
from ..tensors import integers, sent
from .agreement import ALONE, ProcessAgreement
from .ahead import PassAhead
from .carried import Carried
from .joint_passes import continue_joint, end_joint
from .sampling.choice import Chosen, TokenLogprobs, choose_tokens
from .scheduling.scheduler import Scheduler
from .sequence import NO_DRAFT, Chunk, Draft, Sequence
from .speculation.speculation import Speculation
from .speculation.trees import pass_ranges
from .speculation.verifiers.rejection import TokenVerifier

TOKEN_VERIFIER = TokenVerifier()  # of batchers without drafts


@dataclass(frozen=True)
class Progress:
    """The result of a pass for one sequence.

    tokens: its new tokens. logprobs: one for each new token, None if the sequence reports none. error: why the
    sequence failed.
    """

    sequence: Sequence
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: BaseException | None = None


class Batcher:
    """Continuous batching of sequences over one model and its pages (Orca, Yu et al. 2022).

    A sequence's tokens do not depend on the other sequences if the model's kernels are row-invariant: if they round
    each row of their input in the same way, whatever the other rows are.
    """

    def __init__(
        self,
        runner: Runner,
        pages: Pages,
        speculation: Speculation | None = None,
        *,
        token_budget: int | None = None,
        max_running: int | None = None,
        agreement: ProcessAgreement = ALONE,
    ) -> None:
        self.runner, self.pages, self.speculation, self.agreement = runner, pages, speculation, agreement
        self.scheduler = Scheduler(pages, token_budget=token_budget, max_running=max_running)
        self.token_budget = token_budget
        self.num_passes = self.num_computed = self.peak_blocks = 0
        self.num_out_of_memory = self._rows = 0  # passes that did not fit; rows of the last pass
        self.ahead = PassAhead(runner, pages)
        self.in_pass: list[Sequence] = []  # the sequences of the last pass, even if it failed

    def add(self, sequence: Sequence, cached: CachedSequence | None = None) -> None:
        """Add a sequence. It waits for admission, or runs at once if `cached` holds its first tokens.

        Raises OutOfBlocksError for a sequence that is too long for the pages.
        """
        if cached is None:
            self.scheduler.add(sequence)
        else:
            self.scheduler.enter(sequence, cached)

    def remove(self, sequence: Sequence, reason: str, error: BaseException | None = None) -> None:
        """End a sequence now. Its blocks are released, and no later pass computes it."""
        self.scheduler.remove(sequence, reason, error)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        if self.speculation is not None:
            self.speculation.forget(sequence)

    def close(self) -> None:
        """End all sequences."""
        self.ahead.drop(wait=True)
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self.remove(sequence, "cancelled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def isolate(self, sequences: abc.Sequence[Sequence]) -> None:
        """Run each of these sequences alone after a failed pass, before the others go on; see Scheduler.isolate."""
        self.scheduler.isolate(sequences)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.no_grad()
    def step(self) -> list[Progress]:
        """Run one pass, and return the progress of each sequence that has new tokens or failed.

        If the model raises, this raises too. Every sequence then has the tokens that it had before the pass and will
        be recomputed. `in_pass` lists the sequences of the pass, and take_failed() returns those that failed before
        the model was called.

        If the device has too little memory for a pass, later passes have half as many rows, for which the last
        sequences wait, and no error is raised. HfAccelError: not even a pass of one row fits.
        """
        while True:
            try:
                return self._pass()
            except torch.OutOfMemoryError as error:
                self._make_smaller(error)

    def _make_smaller(self, error: torch.OutOfMemoryError) -> None:
        """Free memory, or make later passes smaller, after a pass that did not fit."""
        self.num_out_of_memory += 1
        if self._free_memory():
            return
        if self._rows <= 1:
            raise HfAccelError(
                f"one token of one sequence does not fit into the memory of {self.runner.device}, next to the weights "
                "and the KV cache; lower max_tokens= of the cache, store less in it (CacheConfig(dtype='int8')), or "
                "quantize the weights (patch(model, weights='int4'))"
            ) from error
        self.token_budget = self.scheduler.token_budget = self._rows // 2
        warnings.warn(
            f"a pass of {self._rows} tokens does not fit into the memory of {self.runner.device}; passes have at most "
            f"{self.token_budget} from now on, and sequences wait for their turn. Lower token_budget=, max_running=, "
            "or max_tokens= of the cache, or quantize the weights (patch(model, weights='int4'))",
            HfAccelWarning,
            stacklevel=4,
        )

    def _free_memory(self) -> bool:
        """Free memory that passes can do without; returns whether there was any."""
        return False

    def _pass(self) -> list[Progress]:
        self.in_pass, self._rows = [], 0
        if self.speculation is not None:
            self.speculation.begin_pass()
        try:
            chunks = self.scheduler.schedule()
            self.in_pass = [chunk.sequence for chunk in chunks]
            self._rows = sum(chunk.count for chunk in chunks)
            self.peak_blocks = max(self.peak_blocks, sum(group.pool.num_used for group in self.pages.groups))
            if not chunks:
                return self.take_failed()
            drafts = [NO_DRAFT] * len(chunks)
            if self.speculation is not None:
                drafts = self.speculation.propose(chunks, self._room(chunks), self.pages)
                self._rows += sum(len(draft.tokens) for draft in drafts)
            progress = self._choose(chunks, drafts, self._forward(chunks, drafts))
        except BaseException:
            self.ahead.drop()
            self.scheduler.restart()
            for sequence in self.in_pass:
                # A draft model may count tokens as computed that it has not computed.
                self._forget(sequence)
            raise
        if self.speculation is not None:
            self.speculation.observe_pass(self._rows)
        self.num_passes, self.num_computed = self.num_passes + 1, self.num_computed + self._rows
        return self.take_failed() + progress

    def _room(self, chunks: abc.Sequence[Chunk]) -> int | None:
        """The tokens of the budget that are left for drafts; None if there is no budget."""
        return None if self.token_budget is None else self.token_budget - sum(chunk.count for chunk in chunks)

    def take_failed(self) -> list[Progress]:
        """Return the sequences that the scheduler ended because of an error since the last call."""
        failed = self.scheduler.take_failed()
        for sequence in failed:
            self._forget(sequence)
            if sequence.joint is not None:
                end_joint(self.scheduler, sequence.joint, sequence.error)
        return [Progress(s, [], error=s.error) for s in failed]

    def statistics(self) -> dict[str, int]:
        """Count passes, computed tokens and preemptions so far, and add the statistics of the pages.

        out_of_memory: the passes for which the device had too little memory, if there were any.
        """
        return {
            "passes": self.num_passes,
            "computed_tokens": self.num_computed,
            "preemptions": self.scheduler.num_preempted,
            **({"out_of_memory": self.num_out_of_memory} if self.num_out_of_memory else {}),
            **self.pages.statistics(),
        }

    # -- the pass --------------------------------------------------------------------------------------

    def _forward(self, chunks: abc.Sequence[Chunk], drafts: abc.Sequence[Draft]) -> Tensor:
        """Run the model; returns logits for the chunks that reach their sequence's end.

        Each such chunk has a row for its last token and one for each drafted token.
        """
        launched = self.ahead.logits_for(chunks, drafts)
        if launched is not None:
            return launched
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        ranges, sequences = list[TokenRange](), list[Sequence]()
        for chunk, draft in zip(chunks, drafts, strict=True):
            sequence, start = chunk.sequence, chunk.sequence.num_computed
            forks = () if self.speculation is None else self.speculation.forks_of(sequence)
            for each in pass_ranges(chunk, draft, forks, len(ids)):
                positions += each.span
                ranges.append(each)
                sequences.append(sequence)
            ids += sequence.tokens[start : start + chunk.count]
            ids += draft.tokens
            if chunk.reaches_end:
                keep += range(len(ids) - len(draft.tokens) - 1, len(ids))
        step, carried = self.pages.step(ranges), Carried.of(sequences, ranges)
        more = {} if carried is None else {"carried": carried}
        logits = self.runner(ids, positions, step, keep, **more)
        if self.speculation is not None:
            self.speculation.watch(chunks, drafts)
        return logits

    def _choose(self, chunks: abc.Sequence[Chunk], drafts: abc.Sequence[Draft], logits: Tensor) -> list[Progress]:
        """Choose tokens for the chunks that reach their sequence's end, and commit them.

        The followers of a sequence choose their first token from its logits.
        """
        sequences: list[Sequence] = []
        proposed: list[Draft] = []
        rows: list[int] = []
        end = 0
        for chunk, draft in zip(chunks, drafts, strict=True):
            sequence, reaches_end = chunk.sequence, chunk.reaches_end
            sequence.num_computed += chunk.count
            if chunk.count > 1 and sequence.cached is not None:
                self.pages.publish_states(sequence.cached, sequence.num_computed)
            if reaches_end:
                begin, end = end, end + 1 + len(draft.tokens)
                followers = self.scheduler.fork(sequence) if sequence.followers else []
                if sequence.inputs is not None:
                    for each in (sequence, *followers):
                        each.forget_asked()
                sequences += [sequence, *followers]
                proposed += [draft, *[NO_DRAFT] * len(followers)]
                rows += list(range(begin, end)) * (1 + len(followers))
        if len(rows) != len(logits):
            logits = logits[sent(integers(rows), logits)]
        progress: list[Progress] = []
        if any(sequence.joint is not None for sequence in sequences):
            ended = continue_joint(self.scheduler, sequences, logits, self.agreement)
            progress = [Progress(each, [], error=each.error) for each in ended]
            others = [at for at, sequence in enumerate(sequences) if sequence.joint is None]
            if not others:
                return progress
            sequences, proposed = [sequences[at] for at in others], [proposed[at] for at in others]
            logits = logits[sent(integers(others), logits)]
        verifier = TOKEN_VERIFIER if self.speculation is None else self.speculation.verifier
        are_all = len(sequences) == len(self.scheduler.running) and not self.scheduler.waiting
        meanwhile = self.ahead.launching(sequences) if are_all and self.speculation is None else None
        chosen = choose_tokens(logits, sequences, proposed, verifier, meanwhile=meanwhile)
        if self.agreement.size > 1:
            # A rank that rounds otherwise, or draws without a seed, would go on with other tokens than the others.
            chosen = self.agreement.agree(chosen)
        return progress + [self._commit(*pair) for pair in zip(sequences, chosen, strict=True)]

    def _commit(self, sequence: Sequence, chosen: Chosen | BaseException) -> Progress:
        """Append the chosen tokens to a sequence. An error ends this sequence only, so others keep their tokens."""
        error = chosen if isinstance(chosen, BaseException) else None
        if not isinstance(chosen, BaseException):
            try:
                return self._advance(sequence, chosen)
            except Exception as raised:
                error = raised
        self.remove(sequence, "error", error)
        return Progress(sequence, [], error=error)

    def _advance(self, sequence: Sequence, chosen: Chosen) -> Progress:
        tokens, reason, error = self._append(sequence, chosen)
        logprobs = chosen.logprobs and chosen.logprobs[: len(tokens)]
        if error is not None:
            self.remove(sequence, "error", error)
            return Progress(sequence, tokens, logprobs, error)
        if self.speculation is not None:
            self.speculation.observe(sequence, chosen.tokens[: chosen.num_accepted], len(tokens))
            self.speculation.settle(sequence, tokens)
        before, sequence.num_computed = sequence.num_computed, len(sequence.tokens) - 1
        assert sequence.cached is not None
        sequence.cached.truncate(sequence.num_computed)
        if sequence.num_computed // self.pages.sharing_size > (before - 1) // self.pages.sharing_size:
            self.pages.publish(sequence.cached, sequence.contents(sequence.num_computed))
            self.pages.publish_states(sequence.cached, sequence.num_computed)
        if reason is not None:
            if sequence.settings.keeps_pages:
                sequence.kept_pages = sequence.cached.fork()
            self.remove(sequence, reason)
        return Progress(sequence, tokens, logprobs)

    @staticmethod
    def _append(sequence: Sequence, chosen: Chosen) -> tuple[list[int], str | None, BaseException | None]:
        """Append the chosen tokens one by one until the sequence ends.

        Returns the appended tokens, why the sequence ends (None if it goes on), and an error. A token is not appended
        if its stop rule raises; the tokens before it stay. Exceptions that are not an Exception (KeyboardInterrupt)
        are returned too, because other sequences already have their tokens of this pass. The caller of step() raises
        them or reports them.
        """
        tokens = chosen.tokens
        for number, token in enumerate(tokens, start=1):
            sequence.tokens.append(token)
            try:
                reason = sequence.stop_reason()
            except BaseException as error:
                sequence.tokens.pop()
                return tokens[: number - 1], None, error
            if reason is None and sequence.num_left <= 0:
                reason = "length"
            if reason is not None:
                return tokens[:number], reason, None
        return tokens, None, chosen.error


class Runner(Protocol):
    """A model that reads and writes pages."""

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self, ids: list[int] | Tensor, positions: list[int], step: Step, keep: list[int],
        *, carried: Carried | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute N tokens of one or many sequences, which stand end to end.

        ids: N, or a tensor [N] int64 on the model's device: one token of each sequence, which the host has not read.
        positions: N. step: the slots that the pass writes and reads; its tensors are on the host. keep: the
        indices of the tokens whose logits are wanted. carried: what tokens carry besides their ids; None for nothing.
        Returns logits [len(keep), V], on the model's device.
        """
