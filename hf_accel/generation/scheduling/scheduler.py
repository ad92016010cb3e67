"""The scheduler: which tokens of which sequences the next pass computes, and which sequence is preempted."""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...errors import OutOfBlocksError, UnsupportedError
from ..sequence import PATIENCE, Chunk, Sequence, Status, WaitingQueue

if TYPE_CHECKING:
    from ...cache.cached_sequence import CachedSequence
    from ...cache.pages import Pages

RETRY_PASSES = 16  # after which a refused sequence is tried again: more blocks of its prompt may be cached by then


class Scheduler:
    """Continuous batching with chunked prefill (Orca, Sarathi) and preemption by recomputation (vLLM).

    A pass computes one token of every decoding sequence, then chunks of prompts that are in prefill, then chunks of
    newly admitted sequences. Together these are at most `token_budget` tokens (None: no limit). At most `max_running`
    sequences run, and at most `token_budget`. Only fork() may exceed these limits; the sequences then take turns.

    Order: promoted sequences first (see WaitingQueue), then higher priority, then earlier arrival. Admission stops at
    the first sequence that cannot be admitted, so that smaller prompts do not overtake a large one.

    Admission: a sequence is admitted if the free blocks hold the rest of its prompt, the rest of all prompts in
    prefill, and one more block for each running sequence and each follower. So no sequence is preempted before it had
    room for block_size more tokens. If nothing runs, the first sequence is always admitted.

    Preemption: when a decoding sequence needs a block and none is free, the last running sequence in the order is
    preempted; this may be the decoding sequence itself. The first running sequence is never preempted, and it fits
    alone (`add` checks that). So it comes closer to its end in every pass, and preemption cannot go on for ever.

    Failure: an error of one sequence (such as no memory to grow its pages) ends this sequence, and the pass goes on
    without it. After an error of a whole pass, call restart(), and isolate() to find the sequence that caused it.

    Running sequences hold pages, waiting ones hold none. A leader's followers are further samples of its prompt: they
    wait until it is computed, and then share its pages. Between schedule() and the end of the pass, its sequences must
    not be removed.
    """

    def __init__(
        self, pages: Pages, *, token_budget: int | None, max_running: int | None = None, patience: int = PATIENCE
    ) -> None:
        for name, value in (("token_budget", token_budget), ("max_running", max_running), ("patience", patience)):
            if value is not None and value < 1:
                raise UnsupportedError(f"{name}={value}; give at least 1, or None for no bound")
        self.pages = pages
        self.running: list[Sequence] = []  # in the order of WaitingQueue.rank
        self._waiting = WaitingQueue(patience)
        self._leaders: dict[Sequence, Sequence] = {}  # the leader of each follower that waits
        self._failed: list[Sequence] = []  # the result of the next take_failed()
        # Suspects are sequences of a pass that failed. Each runs alone once, so that the faulty one is found.
        self._suspects: dict[Sequence, None] = {}  # in the order in which they run
        self._tried: Sequence | None = None  # the suspect whose decoding pass was scheduled last
        self.token_budget, self.max_running = token_budget, max_running
        self._num_arrived = self._num_passes = self.num_preempted = 0
        self._served: dict[Sequence, int] = {}  # each sequence's last turn, while the budget is too small for all
        # The waiting sequence that was refused last, the slack at that time, and the number of the pass.
        self._refused: tuple[Sequence, list[int], int] | None = None

    # -- arriving and ending ---------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Sequence]:
        """The waiting sequences in the order of admission. Followers are not listed."""
        return list(self._waiting)

    @property
    def has_work(self) -> bool:
        """True if a sequence runs or waits, or failed and was not returned by take_failed() yet."""
        return bool(self.running or self._waiting or self._failed)

    def require_room(self, sequence: Sequence) -> None:
        """Raise OutOfBlocksError if the sequence does not fit even when it runs alone. Any thread may call this."""
        capacity = self.pages.capacity
        wanted = sequence.num_prompt + (limit := sequence.settings.max_new_tokens)
        if capacity is not None and wanted > capacity:
            raise OutOfBlocksError(
                f"a prompt of {sequence.num_prompt} tokens and max_new_tokens={limit} make {wanted} "
                f"tokens, the cache holds {capacity}; lower max_new_tokens, shorten the prompt, or raise max_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Add a sequence and its followers to the waiting sequences.

        Raises OutOfBlocksError if it or a follower is too long for the cache, and UnsupportedError for an empty
        prompt; nothing is then added.
        """
        group = [sequence, *sequence.followers]
        for each in group:
            if not each.tokens:
                raise UnsupportedError("the prompt has no tokens; give at least one")
            self.require_room(each)
        for each in group:
            each.arrival = self._num_arrived
            self._num_arrived += 1
        self._wait(sequence)

    def enter(self, sequence: Sequence, cached: CachedSequence) -> None:
        """Run a sequence at once. cached: holds its first tokens; the scheduler releases it when the sequence ends.

        Raises OutOfBlocksError if it is too long for the cache.
        """
        self.require_room(sequence)
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self._run(sequence, cached)

    def _wait(self, leader: Sequence) -> None:
        self._waiting.add(leader)
        for follower in leader.followers:
            self._leaders[follower] = leader

    def remove(self, sequence: Sequence, reason: str, error: BaseException | None = None) -> None:
        """End a sequence, whether it runs, waits or follows. A finished sequence stays as it is.

        If it has followers that still wait, the first of them becomes the leader of the others.
        """
        if sequence.is_finished:
            return
        leader = self._leaders.pop(sequence, None)
        if leader is not None:
            leader.followers.remove(sequence)
        elif sequence.cached is not None:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.arrival >= 0:
            self._waiting.remove(sequence)
        sequence.status, sequence.finish_reason, sequence.error = Status.FINISHED, reason, error
        self._waiting.forget(sequence)
        self._suspects.pop(sequence, None)
        self._served.pop(sequence, None)
        if sequence.followers and sequence.arrival >= 0:
            first, *others = sequence.followers
            sequence.followers = []
            del self._leaders[first]
            first.followers = others
            self._wait(first)

    def take_failed(self) -> list[Sequence]:
        """Return the sequences that failed since the last call. The caller must report their errors."""
        failed, self._failed = self._failed, []
        return failed

    def fork(self, leader: Sequence) -> list[Sequence]:
        """Run the followers of a leader whose prompt is computed, on the same blocks.

        Returns the followers that run. Before the next schedule(), each needs its first token, chosen from the
        leader's logits. Raises ValueError if the leader's prompt is not computed.
        """
        if leader.cached is None or leader.num_computed < leader.num_prompt:
            raise ValueError(f"the leader's prompt is not computed: {leader.num_computed} of {leader.num_prompt}")
        forked = []
        for follower in list(leader.followers):
            try:
                cached = leader.cached.fork()
            except Exception as error:
                self._fail(follower, error)
                continue
            cached.truncate(leader.num_prompt)
            leader.followers.remove(follower)
            del self._leaders[follower]
            self._run(follower, cached)
            forked.append(follower)
        return forked

    def restart(self) -> None:
        """Recompute all running sequences after a failed pass, because the content of their blocks may be wrong."""
        self.pages.clear_prefixes()
        self._tried = None
        while self.running:
            self._suspend(self.running[-1])

    def isolate(self, sequences: Iterable[Sequence]) -> None:
        """Run each of these sequences alone, to find which one made the pass fail. Call this after restart().

        A sequence runs alone until it has decoded once, because there are drafts only when it decodes. The other
        sequences wait meanwhile.
        """
        self._suspects = dict.fromkeys(sequence for sequence in sequences if not sequence.is_finished)

    def _next_suspect(self) -> Sequence | None:
        """Return the sequence that runs alone in the next pass, or None.

        The suspect whose decoding pass came before did not fail, so it is no longer a suspect.
        """
        if self._tried is not None:
            self._suspects.pop(self._tried, None)
        suspect = next(iter(self._suspects), None)
        self._tried = suspect if suspect is not None and suspect.decodes else None
        return suspect

    # -- one pass --------------------------------------------------------------------------------------

    def schedule(self) -> list[Chunk]:
        """Choose the chunks of the next pass and allocate their slots. Decoding chunks come first.

        Every running sequence's `cached` must hold exactly num_computed tokens. The result is empty only if no work
        is left.
        """
        self._num_passes += 1
        budget = sys.maxsize if self.token_budget is None else self.token_budget
        while (suspect := self._next_suspect()) is not None:
            if chunks := self._schedule_alone(suspect, budget):
                return chunks
        preempted = self.num_preempted
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            computed = sequence.num_computed
            is_decoding = len(sequence.tokens) - computed == 1 and computed >= sequence.num_prompt
            (decoding if is_decoding else prefilling).append(sequence)
        chunks = self._decode(self._take_turns(decoding, budget))
        left = self._prefill(chunks, prefilling, budget - len(chunks))
        if self._waiting and self.num_preempted == preempted:
            self._admit(chunks, left)
        while not chunks and (self.running or self._waiting):
            self._force(chunks, budget)
        return chunks

    def _schedule_alone(self, suspect: Sequence, budget: int) -> list[Chunk]:
        """Suspend all other sequences and return a chunk of this one; no chunk if the sequence failed."""
        chunks: list[Chunk] = []
        for other in [sequence for sequence in self.running if sequence is not suspect]:
            self._suspend(other)
        if suspect.cached is None:
            try:
                cached = self.pages.begin_with_prefix(suspect.contents(len(suspect.tokens)), suspect.source)
            except Exception as error:
                self._fail(suspect, error)
                return chunks
            self._waiting.remove(suspect)
            self._run(suspect, cached)
        self._force(chunks, budget)
        return chunks

    def _take_turns(self, decoding: list[Sequence], budget: int) -> list[Sequence]:
        """Return the sequences that may decode: all, or those not served for longest if the budget is too small."""
        if len(decoding) <= budget:
            self._served.clear()
            return decoding
        chosen = sorted(decoding, key=lambda s: self._served.get(s, -1))[:budget]
        for place, sequence in enumerate(chosen):
            self._served[sequence] = self._num_passes * budget + place
        return [sequence for sequence in decoding if self._served.get(sequence, -1) >= self._num_passes * budget]

    def _decode(self, decoding: list[Sequence]) -> list[Chunk]:
        """Allocate a slot for the next token of each sequence, in order.

        A preempted sequence comes later in the order, so it has no chunk in this pass yet.
        """
        chunks = []
        append = self.pages.append
        for sequence in decoding:
            cached = sequence.cached
            if cached is None:
                continue  # a sequence before it preempted it
            try:
                try:
                    append(cached, 1)
                except OutOfBlocksError:
                    if not self._make_room(sequence, cached):
                        continue
                    append(cached, 1)
            except Exception as error:  # for example, no memory to copy a block; the other sequences can go on
                self._fail(sequence, error)
                continue
            chunks.append(Chunk(sequence, 1))
        return chunks

    def _prefill(self, chunks: list[Chunk], prefilling: list[Sequence], budget: int) -> int:
        """Add chunks of sequences in prefill, and return the rest of the budget."""
        for sequence in prefilling:
            if sequence.cached is not None and budget > 0:
                wanted = min(len(sequence.tokens) - sequence.num_computed, budget)
                count = self._reserve(chunks, sequence, sequence.cached, wanted)
                budget -= count
                if count < wanted and not sequence.is_finished:
                    break  # sequences behind it must not take the blocks that it needs
        return budget

    def _reserve(self, chunks: list[Chunk], sequence: Sequence, cached: CachedSequence, wanted: int) -> int:
        """Add a chunk of at most `wanted` tokens, for which there is room, and return their number.

        An error ends the sequence."""
        try:
            count = sequence.chunk(self.pages.room(cached, wanted))
            count = count if self.pages.can_append(cached, count) else 0  # it may need more than there is room for
            if count:
                self.pages.append(cached, count)
                chunk = Chunk(sequence, count)
                # Full blocks are published before they are computed: a sequence of the same pass may share them, since
                # in each layer a pass writes K and V before it reads them. The chunk, added next, computes them.
                self.pages.publish(cached, sequence.contents(sequence.num_computed + count))
                chunks.append(chunk)
        except Exception as error:
            self._fail(sequence, error)
            return 0
        return count

    def _force(self, chunks: list[Chunk], budget: int) -> None:
        """Add a chunk of the first sequence that has one left when none got any. It may preempt others."""
        if not self.running:
            self._admit(chunks, budget)
            return
        first = next((sequence for sequence in self.running if sequence.num_computed < len(sequence.tokens)), None)
        if first is None:  # all that run are beams, which wait for one that finds no room next to them
            self._fail(self._waiting.head, self._no_room(self._waiting.head))
            return
        if first.cached is not None and self._make_room(first, first.cached, first.chunk(1)):
            self._reserve(chunks, first, first.cached, min(len(first.tokens) - first.num_computed, budget))

    # -- admission -------------------------------------------------------------------------------------

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        places = self._places()
        slack: list[int] | None = None
        while self._waiting and budget > 0:
            head = self._waiting.head
            size = 1 + len(head.followers)
            # A sequence for which others wait has a place.
            if self.running and size > places and not any(s.joint is head.joint is not None for s in self.running):
                return
            slack = self._slack() if slack is None else slack
            if self.running and self._was_refused(head, slack):
                return
            free = self.pages.free_blocks()
            try:
                cached = self.pages.begin_with_prefix(head.contents(len(head.tokens)), head.source)
            except Exception as error:
                self._fail(head, error)
                slack, places = None, self._places()
                continue
            left = len(head.tokens) - cached.num_tokens
            taken = zip(slack, free, self.pages.free_blocks(), self.pages.blocks_for(cached, left), strict=True)
            rest = [had - (before - after) - needed - size for had, before, after, needed in taken]
            if self.running and (min(rest) < 0 or not self.pages.can_append(cached, 1)):
                cached.release()
                self._refused = (head, slack, self._num_passes)
                return
            self._run(self._waiting.admit_head(), cached)
            count = self._reserve(chunks, head, cached, min(left, budget))
            if head.is_finished:
                slack, places = None, self._places()
                continue
            if not count and len(self.running) == 1:
                self._fail(head, self._no_room(head))
            slack = rest
            budget -= count
            places -= size

    def _places(self) -> int:
        """The number of further sequences that may run."""
        bounds = [bound for bound in (self.max_running, self.token_budget) if bound is not None]
        return min(bounds) - sum(1 + len(s.followers) for s in self.running) if bounds else sys.maxsize

    def _slack(self) -> list[int]:
        """For each group, the number of free blocks beyond those kept for running sequences (see Admission)."""
        self._slide()
        slack = self.pages.free_blocks()
        size = 0
        for sequence in self.running:
            assert sequence.cached is not None
            size += 1 + len(sequence.followers)
            left = len(sequence.tokens) - sequence.cached.num_tokens
            if left > 0:
                slack = [h - n for h, n in zip(slack, self.pages.blocks_for(sequence.cached, left), strict=True)]
        return [have - size for have in slack]

    def _slide(self) -> None:
        """Release the blocks behind the sliding windows of all running sequences."""
        if any(group.window is not None for group in self.pages.groups):
            for sequence in self.running:
                assert sequence.cached is not None
                self.pages.slide(sequence.cached, sequence.num_computed)

    def _was_refused(self, head: Sequence, slack: list[int]) -> bool:
        """Return whether this sequence was refused lately and the slack has not grown since.

        It is then not tried again, because looking up its prefix needs the digests of its whole prompt.
        """
        if self._refused is None or self._refused[0] is not head:
            return False
        _, before, when = self._refused
        recently = self._num_passes - when < RETRY_PASSES
        return recently and all(now <= then for now, then in zip(slack, before, strict=True))

    # -- preemption ------------------------------------------------------------------------------------

    def _make_room(self, sequence: Sequence, cached: CachedSequence, count: int = 1) -> bool:
        """Preempt sequences until `sequence` has room for `count` tokens; False if it was preempted or failed."""
        self._slide()
        while not self.pages.can_append(cached, count):
            victim = self.running[-1]
            if victim is not sequence:
                self._preempt(victim)
            elif len(self.running) > 1:
                self._preempt(sequence)
                return False
            else:
                self._fail(sequence, self._no_room(sequence))
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._suspend(sequence)
        sequence.num_preemptions += 1
        self.num_preempted += 1

    def _no_room(self, sequence: Sequence) -> OutOfBlocksError:
        """The error of a sequence that has no room although nothing else runs.

        Something outside of this scheduler must hold the blocks.
        """
        free, size = min(self.pages.free_blocks()), self.pages.block_size
        held = 0 if sequence.cached is None else sequence.cached.num_tokens
        return OutOfBlocksError(
            f"a sequence of {len(sequence.tokens)} tokens has room for {held + free * size} although nothing else "
            f"runs (the cache can hold {self.pages.capacity}); release what else holds its blocks, or raise max_tokens"
        )

    # -- changes of status -----------------------------------------------------------------------------

    def _run(self, sequence: Sequence, cached: CachedSequence) -> None:
        sequence.cached, sequence.num_computed, sequence.status = cached, cached.num_tokens, Status.RUNNING
        insort(self.running, sequence, key=self._waiting.rank)

    def _suspend(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed, sequence.status = 0, Status.WAITING
        self._waiting.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.cached is not None
        sequence.cached.release()
        sequence.cached = None

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        """End one sequence because of an error of its own. take_failed() will return it."""
        self.remove(sequence, "failed", error)
        self._failed.append(sequence)
