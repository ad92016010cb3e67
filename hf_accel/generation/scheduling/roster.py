"""The running and the waiting sequences, and their order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...errors import OutOfBlocksError, UnsupportedError
from ..sequence import Sequence, Status

if TYPE_CHECKING:
    from ...cache.pages import CachedSequence, Pages

PATIENCE = 8  # how often the oldest waiting sequence may be overtaken


class WaitingQueue:
    """The waiting sequences, ordered by priority and then by arrival. None of them waits for ever.

    When a sequence is admitted while an older one waits, the oldest one counts as overtaken. After `patience` times
    the oldest one is *promoted*: until it ends, it goes before all sequences that are not promoted, also when blocks
    run out. Every sequence becomes the oldest at some time, so a stream of sequences with a high priority delays the
    others but does not stop them. Only every `patience`-th admission promotes a sequence, so a new sequence with a
    high priority does not wait for a whole backlog of old ones. (It would, if priority rose with waiting time.)
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self.patience = patience
        self._ranked: list[Sequence] = []
        self._by_arrival: list[Sequence] = []
        self._promoted: set[Sequence] = set()
        self._overtaken: dict[Sequence, int] = {}  # how often each was overtaken while it was the oldest

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ranked)

    def rank(self, sequence: Sequence) -> tuple[bool, int, int]:
        """The sort key; the smallest goes first. It changes only by promotion, while the sequence waits."""
        return sequence not in self._promoted, -sequence.priority, sequence.arrival

    @property
    def head(self) -> Sequence:
        return self._ranked[0]

    def add(self, sequence: Sequence) -> None:
        insort(self._ranked, sequence, key=self.rank)
        insort(self._by_arrival, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        del self._ranked[bisect_left(self._ranked, self.rank(sequence), key=self.rank)]
        del self._by_arrival[bisect_left(self._by_arrival, sequence.arrival, key=_arrival)]
        self._overtaken.pop(sequence, None)

    def admit_head(self) -> Sequence:
        """Remove the first sequence and return it. This may promote the oldest one."""
        sequence, oldest = self.head, self._by_arrival[0]
        self.remove(sequence)
        if oldest is not sequence:
            self._overtaken[oldest] = self._overtaken.get(oldest, 0) + 1
            if self._overtaken[oldest] >= self.patience:
                self._promote(oldest)
        return sequence

    def _promote(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self._promoted.add(sequence)
        self.add(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Forget that an ended sequence was promoted."""
        self._promoted.discard(sequence)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class Roster:
    """The running and waiting sequences. Running sequences hold pages, waiting ones hold none.

    A leader's followers are further samples of the same prompt. They wait until the leader's prompt is computed, and
    then share its pages.
    """

    def __init__(self, pages: Pages, patience: int = PATIENCE) -> None:
        self.pages = pages
        self.running: list[Sequence] = []  # in the order of WaitingQueue.rank
        self._waiting = WaitingQueue(patience)
        self._leaders: dict[Sequence, Sequence] = {}  # the leader of each follower that waits
        self._failed: list[Sequence] = []  # the result of the next take_failed()
        # Suspects are sequences of a pass that failed. Each runs alone once, so that the faulty one is found.
        self._suspects: dict[Sequence, None] = {}  # in the order in which they run
        self._tried: Sequence | None = None  # the suspect whose decoding pass was scheduled last
        self._num_arrived = 0

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
        wanted = sequence.num_prompt + sequence.max_new_tokens
        if capacity is not None and wanted > capacity:
            raise OutOfBlocksError(
                f"a prompt of {sequence.num_prompt} tokens and max_new_tokens={sequence.max_new_tokens} make {wanted} "
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
