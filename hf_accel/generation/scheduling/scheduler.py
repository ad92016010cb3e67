"""What the next pass computes of which sequences, and who gives way when blocks run out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ...errors import OutOfBlocksError, UnsupportedError
from ..sequence import Chunk, Sequence
from .roster import PATIENCE, Roster

if TYPE_CHECKING:
    from ...cache.pages import CachedSequence, Pages

RETRY_PASSES = 16  # after which a refused sequence is looked at again, for what is known of its prompt by then


class Scheduler(Roster):
    """Continuous batching with chunked prefill (Orca, Sarathi) and preemption by recomputing (vLLM).

    One pass: a token for every decoding sequence, then chunks of the prompts under way, then admissions, together
    at most `token_budget` tokens (None: any number). At most `max_running` sequences run, and no more than the
    budget has tokens; only fork() may bring more, which then take turns.

    Order everywhere: promoted ones (see WaitingQueue), then higher priority, then arrival. Admission stops at the
    first that cannot enter, so that a large prompt keeps its place.

    Admission: a sequence enters if the free blocks hold what is left of its prompt and of the prompts under way,
    and one more block for each that runs, its followers counted. So none is preempted before it has room for
    block_size more tokens. With nothing running, the first always enters.

    Preemption: a decoding sequence that finds no slot takes the blocks of the last one in the order, which may be
    itself. The first one in the order is never preempted, and alone it fits (`add` sees to that): every pass brings
    it nearer to its end, so that sequences cannot preempt each other for ever.

    Failure: what fails for one sequence (no memory to grow its pages or to copy a block, say) ends that one; the pass
    goes on without it. After a pass that failed as a whole: restart(), and isolate() to find out whose fault it was.

    Between schedule() and the end of the pass the sequences in it must not be removed.
    """

    def __init__(
        self, pages: Pages, *, token_budget: int | None, max_running: int | None = None, patience: int = PATIENCE
    ) -> None:
        for name, value in (("token_budget", token_budget), ("max_running", max_running), ("patience", patience)):
            if value is not None and value < 1:
                raise UnsupportedError(f"{name}={value}; give at least 1, or None for no bound")
        super().__init__(pages, patience)
        self.token_budget = token_budget
        self.max_running = max_running
        self.num_preempted = 0
        self._num_passes = 0
        self._served: dict[Sequence, int] = {}  # the last turn of each, while there are too many for the budget
        self._refused: tuple[Sequence, list[int], int] | None = None  # the head, what it found, and when

    def remove(self, sequence: Sequence, reason: str, error: BaseException | None = None) -> None:
        super().remove(sequence, reason, error)
        self._served.pop(sequence, None)

    # -- one pass --------------------------------------------------------------------------------------

    def schedule(self) -> list[Chunk]:
        """The chunks of the next pass, in the order of decoding, prefill, admission; their slots are reserved.

        Rows must hold exactly num_computed tokens. Full blocks of a chunk of a prompt are published at once: a pass
        writes K and V before it reads them. Empty only if nothing is left to do.
        """
        self._num_passes += 1
        budget = sys.maxsize if self.token_budget is None else self.token_budget
        while (suspect := self._next_suspect()) is not None:
            if chunks := self._alone(suspect, budget):
                return chunks
        preempted = self.num_preempted
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            computed = sequence.num_computed
            alone = len(sequence.tokens) - computed == 1 and computed >= sequence.num_prompt
            (decoding if alone else prefilling).append(sequence)
        chunks = self._decode(self._take_turns(decoding, budget))
        left = self._prefill(chunks, prefilling, budget - len(chunks))
        if self._waiting and self.num_preempted == preempted:
            self._admit(chunks, left)
        while not chunks and (self.running or self._waiting):
            self._force(chunks, budget)
        return chunks

    def _alone(self, suspect: Sequence, budget: int) -> list[Chunk]:
        """The chunk of one sequence while the others wait; none if that was its end."""
        chunks: list[Chunk] = []
        for other in [sequence for sequence in self.running if sequence is not suspect]:
            self._suspend(other)
        if suspect.cached is None:
            try:
                cached = self.pages.begin_with_prefix(suspect.tokens)
            except Exception as error:
                self._fail(suspect, error)
                return chunks
            self._waiting.remove(suspect)
            self._run(suspect, cached)
        self._force(chunks, budget)
        return chunks

    def _take_turns(self, decoding: list[Sequence], budget: int) -> list[Sequence]:
        """If the budget has no token for each, those that have waited longest for one."""
        if len(decoding) <= budget:
            self._served.clear()
            return decoding
        chosen = sorted(decoding, key=lambda s: self._served.get(s, -1))[:budget]
        for place, sequence in enumerate(chosen):
            self._served[sequence] = self._num_passes * budget + place
        return [sequence for sequence in decoding if self._served.get(sequence, -1) >= self._num_passes * budget]

    def _decode(self, decoding: list[Sequence]) -> list[Chunk]:
        """In order, so that a victim has not been given its slot yet."""
        chunks = []
        append = self.pages.append
        for sequence in decoding:
            cached = sequence.cached
            if cached is None:
                continue  # preempted by one before it
            try:
                try:
                    append(cached, 1)
                except OutOfBlocksError:
                    if not self._make_room(sequence, cached):
                        continue
                    append(cached, 1)
            except Exception as error:  # no memory to copy a block to, say: nobody else's tokens hang on it
                self._fail(sequence, error)
                continue
            chunks.append(Chunk(sequence, 1))
        return chunks

    def _prefill(self, chunks: list[Chunk], prefilling: list[Sequence], budget: int) -> int:
        """Returns what is left of the budget."""
        for sequence in prefilling:
            if sequence.cached is not None and budget > 0:
                wanted = min(len(sequence.tokens) - sequence.num_computed, budget)
                count = self._reserve(chunks, sequence, sequence.cached, wanted)
                budget -= count
                if count < wanted and not sequence.is_finished:
                    break  # those behind it must not take the blocks that it waits for
        return budget

    def _reserve(self, chunks: list[Chunk], sequence: Sequence, cached: CachedSequence, wanted: int) -> int:
        """A chunk of at most `wanted` tokens; returns how many there was room for. A failure ends the sequence."""
        try:
            count = self.pages.room(cached, wanted)
            if count:
                self.pages.append(cached, count)
                chunk = Chunk(sequence, count)
                self.pages.publish(cached, sequence.tokens[: sequence.num_computed + count])
                chunks.append(chunk)  # nothing fails between these two: what is published is computed in this pass
        except Exception as error:
            self._fail(sequence, error)
            return 0
        return count

    def _force(self, chunks: list[Chunk], budget: int) -> None:
        """Nothing could go on: let the first one, at the cost of the others."""
        if not self.running:
            self._admit(chunks, budget)
            return
        first = self.running[0]
        assert first.cached is not None
        left = len(first.tokens) - first.num_computed
        if not left:
            raise ValueError(f"sequence {first.arrival} runs with all {len(first.tokens)} tokens computed")
        if self._make_room(first, first.cached):
            self._reserve(chunks, first, first.cached, min(left, budget))

    # -- admission -------------------------------------------------------------------------------------

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        places = self._places()
        slack: list[int] | None = None
        while self._waiting and budget > 0:
            head = self._waiting.head
            size = 1 + len(head.followers)
            if self.running and size > places:
                return
            slack = self._slack() if slack is None else slack
            if self.running and self._was_refused(head, slack):
                return
            free = self.pages.free_blocks()
            try:
                cached = self.pages.begin_with_prefix(head.tokens)
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
        """How many more sequences may run."""
        bounds = [bound for bound in (self.max_running, self.token_budget) if bound is not None]
        return min(bounds) - sum(1 + len(s.followers) for s in self.running) if bounds else sys.maxsize

    def _slack(self) -> list[int]:
        """For each group, the free blocks that nobody who runs is about to need (see Admission)."""
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
        """Free what lies behind the windows of all that run."""
        if any(group.window is not None for group in self.pages.groups):
            for sequence in self.running:
                assert sequence.cached is not None
                self.pages.slide(sequence.cached, sequence.num_computed)

    def _was_refused(self, head: Sequence, slack: list[int]) -> bool:
        """Not long ago, and no block has become free since: opening its pages costs a digest of the prompt."""
        if self._refused is None or self._refused[0] is not head:
            return False
        _, before, when = self._refused
        recently = self._num_passes - when < RETRY_PASSES
        return recently and all(now <= then for now, then in zip(slack, before, strict=True))

    # -- who gives way ---------------------------------------------------------------------------------

    def _make_room(self, sequence: Sequence, cached: CachedSequence) -> bool:
        """Preempt others until it can have one slot. False if it had to give way itself."""
        self._slide()
        while not self.pages.can_append(cached, 1):
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
        """There is no room although nothing else runs: the blocks must be held by others than this scheduler."""
        free, size = min(self.pages.free_blocks()), self.pages.block_size
        held = 0 if sequence.cached is None else sequence.cached.num_tokens
        return OutOfBlocksError(
            f"a sequence of {len(sequence.tokens)} tokens has room for {held + free * size} although nothing else "
            f"runs (the cache can hold {self.pages.capacity}); release what else holds its blocks, or raise max_tokens"
        )
