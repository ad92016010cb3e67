"""What the next pass computes of which sequences, and who gives way when blocks run out."""

from __future__ import annotations

import sys
from bisect import insort
from typing import TYPE_CHECKING

from ..errors import OutOfBlocksError, UnsupportedError
from .sequence import Chunk, Sequence, Status
from .waiting import PATIENCE, WaitingQueue

if TYPE_CHECKING:
    from ..cache.rows import Pages, Row

RETRY_PASSES = 16  # after which a refused sequence is looked at again, for what is known of its prompt by then


class Scheduler:
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

    Between schedule() and the end of the pass the sequences in it must not be removed. After a pass that failed:
    restart().
    """

    def __init__(
        self, pages: Pages, *, token_budget: int | None, max_running: int | None = None, patience: int = PATIENCE
    ) -> None:
        for name, value in (("token_budget", token_budget), ("max_running", max_running), ("patience", patience)):
            if value is not None and value < 1:
                raise UnsupportedError(f"{name}={value}; give at least 1, or None for no bound")
        self.pages = pages
        self.token_budget = token_budget
        self.max_running = max_running
        self.running: list[Sequence] = []  # in order
        self.num_preempted = 0
        self._waiting = WaitingQueue(patience)
        self._leaders: dict[Sequence, Sequence] = {}  # of followers that have no row yet
        self._failed: list[Sequence] = []
        self._num_arrived = 0
        self._num_passes = 0
        self._served: dict[Sequence, int] = {}  # the last turn of each, while there are too many for the budget
        self._refused: tuple[Sequence, list[int], int] | None = None  # the head, what it found, and when

    # -- who is here -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Sequence]:
        """In the order of admission. Followers wait behind their leader and are not listed."""
        return list(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    def require_room(self, sequence: Sequence) -> None:
        """Raise OutOfBlocksError if the sequence would not even fit alone. May be called from any thread."""
        capacity = self.pages.capacity
        wanted = sequence.num_prompt + sequence.max_new_tokens
        if capacity is not None and wanted > capacity:
            raise OutOfBlocksError(
                f"a prompt of {sequence.num_prompt} tokens and max_new_tokens={sequence.max_new_tokens} make {wanted} "
                f"tokens, the cache holds {capacity}; lower max_new_tokens, shorten the prompt, or raise max_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn, with its followers behind it.

        Raises OutOfBlocksError, with nothing changed, if it or a follower is too long for the cache, and
        UnsupportedError for an empty prompt.
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

    def enter(self, sequence: Sequence, row: Row) -> None:
        """Run a sequence at once that begins with the tokens of `row`, which is the scheduler's from now on.

        Raises as `add` does.
        """
        self.require_room(sequence)
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self._run(sequence, row)

    def _wait(self, leader: Sequence) -> None:
        self._waiting.add(leader)
        for follower in leader.followers:
            self._leaders[follower] = leader

    def remove(self, sequence: Sequence, reason: str, error: BaseException | None = None) -> None:
        """The sequence has ended, wherever it stood; one that has ended before is left alone.

        If it had followers that have no row yet, the first of them leads the others from now on.
        """
        if sequence.is_finished:
            return
        leader = self._leaders.pop(sequence, None)
        if leader is not None:
            leader.followers.remove(sequence)
        elif sequence.row is not None:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.arrival >= 0:
            self._waiting.remove(sequence)
        sequence.status, sequence.finish_reason, sequence.error = Status.FINISHED, reason, error
        self._waiting.forget(sequence)
        self._served.pop(sequence, None)
        if sequence.followers and sequence.arrival >= 0:
            first, *others = sequence.followers
            sequence.followers = []
            del self._leaders[first]
            first.followers = others
            self._wait(first)

    def take_failed(self) -> list[Sequence]:
        """Sequences that schedule() had to fail since the last call: not even alone was there room for them."""
        failed, self._failed = self._failed, []
        return failed

    def fork(self, leader: Sequence) -> list[Sequence]:
        """Give the followers of a leader whose prompt is computed rows over the same blocks; they run from now on.

        Returns them. Before the next schedule() each needs its first token, chosen from the leader's logits.
        """
        if leader.row is None or leader.num_computed < leader.num_prompt:
            raise ValueError(f"the leader's prompt is not computed: {leader.num_computed} of {leader.num_prompt}")
        forked, leader.followers = leader.followers, []
        for follower in forked:
            del self._leaders[follower]
            row = leader.row.fork()
            row.truncate(leader.num_prompt)
            self._run(follower, row)
        return forked

    def restart(self) -> None:
        """After a pass that failed: no block holds what it should, so all that run wait and are computed anew."""
        self.pages.forget()
        while self.running:
            self._suspend(self.running[-1])

    # -- one pass --------------------------------------------------------------------------------------

    def schedule(self) -> list[Chunk]:
        """The chunks of the next pass, in the order of decoding, prefill, admission; their slots are reserved.

        Rows must hold exactly num_computed tokens. Full blocks of a chunk of a prompt are published at once: a pass
        writes K and V before it reads them. Empty only if nothing is left to do.
        """
        self._num_passes += 1
        preempted = self.num_preempted
        budget = sys.maxsize if self.token_budget is None else self.token_budget
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            computed = sequence.num_computed
            alone = len(sequence.tokens) - computed == 1 and computed >= sequence.num_prompt
            (decoding if alone else prefilling).append(sequence)
        chunks = self._decode(self._take_turns(decoding, budget))
        budget = self._prefill(chunks, prefilling, budget - len(chunks))
        if self._waiting and self.num_preempted == preempted:
            self._admit(chunks, budget)
        while not chunks and self.has_work:
            self._force(chunks)
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
            row = sequence.row
            if row is None:
                continue  # preempted by one before it
            try:
                append(row, 1)
            except OutOfBlocksError:
                if not self._make_room(sequence, row):
                    continue
                append(row, 1)
            chunks.append(Chunk(sequence, 1))
        return chunks

    def _prefill(self, chunks: list[Chunk], prefilling: list[Sequence], budget: int) -> int:
        """Returns what is left of the budget."""
        for sequence in prefilling:
            if sequence.row is not None and budget > 0:
                wanted = min(len(sequence.tokens) - sequence.num_computed, budget)
                count = self._reserve(chunks, sequence, sequence.row, wanted)
                budget -= count
                if count < wanted:
                    break  # those behind it must not take the blocks that it waits for
        return budget

    def _reserve(self, chunks: list[Chunk], sequence: Sequence, row: Row, wanted: int) -> int:
        """A chunk of at most `wanted` tokens; returns how many there was room for."""
        count = self.pages.room(row, wanted)
        if count:
            self.pages.append(row, count)
            self.pages.publish(row, sequence.tokens[: sequence.num_computed + count])
            chunks.append(Chunk(sequence, count))
        return count

    def _force(self, chunks: list[Chunk]) -> None:
        """Nothing could go on: let the first one, at the cost of the others."""
        if not self.running:
            self._admit(chunks, self.token_budget or sys.maxsize)
            return
        first = self.running[0]
        assert first.row is not None
        left = len(first.tokens) - first.num_computed
        if not left:
            raise ValueError(f"sequence {first.arrival} runs with all {len(first.tokens)} tokens computed")
        if self._make_room(first, first.row):
            self._reserve(chunks, first, first.row, min(left, self.token_budget or left))

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
            row = self.pages.open(head.tokens)
            left = len(head.tokens) - row.num_tokens
            taken = zip(slack, free, self.pages.free_blocks(), self.pages.blocks_for(row, left), strict=True)
            rest = [had - (before - after) - needed - size for had, before, after, needed in taken]
            if self.running and (min(rest) < 0 or not self.pages.can_append(row, 1)):
                row.release()
                self._refused = (head, slack, self._num_passes)
                return
            self._run(self._waiting.admit_head(), row)
            count = self._reserve(chunks, head, row, min(left, budget))
            if not count and len(self.running) == 1:
                self._fail(head)
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
            assert sequence.row is not None
            size += 1 + len(sequence.followers)
            left = len(sequence.tokens) - sequence.row.num_tokens
            if left > 0:
                slack = [h - n for h, n in zip(slack, self.pages.blocks_for(sequence.row, left), strict=True)]
        return [have - size for have in slack]

    def _slide(self) -> None:
        """Free what lies behind the windows of all that run."""
        if any(group.window is not None for group in self.pages.groups):
            for sequence in self.running:
                assert sequence.row is not None
                self.pages.slide(sequence.row, sequence.num_computed)

    def _was_refused(self, head: Sequence, slack: list[int]) -> bool:
        """Not long ago, and no block has become free since: opening its row costs a digest of the prompt."""
        if self._refused is None or self._refused[0] is not head:
            return False
        _, before, when = self._refused
        recently = self._num_passes - when < RETRY_PASSES
        return recently and all(now <= then for now, then in zip(slack, before, strict=True))

    # -- in and out ------------------------------------------------------------------------------------

    def _run(self, sequence: Sequence, row: Row) -> None:
        sequence.row, sequence.num_computed, sequence.status = row, row.num_tokens, Status.RUNNING
        insort(self.running, sequence, key=self._waiting.rank)

    def _make_room(self, sequence: Sequence, row: Row) -> bool:
        """Preempt others until it can have one slot. False if it had to give way itself."""
        self._slide()
        while not self.pages.can_append(row, 1):
            victim = self.running[-1]
            if victim is not sequence:
                self._preempt(victim)
            elif len(self.running) > 1:
                self._preempt(sequence)
                return False
            else:
                self._fail(sequence)
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._suspend(sequence)
        sequence.num_preemptions += 1
        self.num_preempted += 1

    def _suspend(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed, sequence.status = 0, Status.WAITING
        self._waiting.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        sequence.row.release()
        sequence.row = None

    def _fail(self, sequence: Sequence) -> None:
        """There is no room although nothing else runs: the blocks must be held by others than this scheduler."""
        free, size = min(self.pages.free_blocks()), self.pages.block_size
        held = 0 if sequence.row is None else sequence.row.num_tokens
        error = OutOfBlocksError(
            f"a sequence of {len(sequence.tokens)} tokens has room for {held + free * size} although nothing else "
            f"runs (the cache can hold {self.pages.capacity}); release what else holds its blocks, or raise max_tokens"
        )
        self.remove(sequence, "failed", error)
        self._failed.append(sequence)
