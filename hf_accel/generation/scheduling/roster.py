"""Which sequences run, which wait, who is next, and who waits behind whom."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...errors import OutOfBlocksError, UnsupportedError
from ..sequence import Sequence, Status

if TYPE_CHECKING:
    from ...cache.pages import CachedSequence, Pages


from bisect import bisect_left
from collections.abc import Iterator

PATIENCE = 8  # admissions in front of the one that has waited longest


class WaitingQueue:
    """Sequences by priority, and by arrival among equals; with a bound on how often one is overtaken.

    Each admission of a sequence while an older one waits counts against the oldest; after `patience` of them the
    oldest is *promoted*: it goes before all that are not, also when blocks run out, until it ends. So whoever is
    oldest is overtaken at most `patience` times, each in turn becomes the oldest, and a stream of urgent sequences
    slows others down but never stops them; while of a backlog of old ones an urgent newcomer meets only every
    `patience`-th. (Ageing by time would let the whole backlog become urgent.)
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self.patience = patience
        self._ranked: list[Sequence] = []
        self._by_arrival: list[Sequence] = []
        self._promoted: set[Sequence] = set()
        self._overtaken: dict[Sequence, int] = {}  # how often each was, while it was the oldest

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ranked)

    def rank(self, sequence: Sequence) -> tuple[bool, int, int]:
        """Smaller goes first; it changes only by promotion, and only while the sequence waits."""
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
        """Take the first one out."""
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
        """It has ended."""
        self._promoted.discard(sequence)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class Roster:
    """Sequences over pages: those that run hold pages, the others hold nothing.

    Followers are samples of their leader's prompt, which get their pages when it is computed.
    """

    def __init__(self, pages: Pages, patience: int = PATIENCE) -> None:
        self.pages = pages
        self.running: list[Sequence] = []  # in order
        self._waiting = WaitingQueue(patience)
        self._leaders: dict[Sequence, Sequence] = {}  # of followers that hold no pages yet
        self._failed: list[Sequence] = []
        self._suspects: dict[Sequence, None] = {}  # in order
        self._tried: Sequence | None = None
        self._num_arrived = 0

    # -- who is here -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Sequence]:
        """In the order of admission. Followers wait behind their leader and are not listed."""
        return list(self._waiting)

    @property
    def has_work(self) -> bool:
        """Also if all that is left is to tell who failed."""
        return bool(self.running or self._waiting or self._failed)

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

    def enter(self, sequence: Sequence, cached: CachedSequence) -> None:
        """Run a sequence at once that begins with the tokens of `cached`, which is the scheduler's from now on.

        Raises as `add` does.
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
        """The sequence has ended, wherever it stood; one that has ended before is left alone.

        If it had followers that hold no pages yet, the first of them leads the others from now on.
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
        """Sequences that failed since the last call, whose errors nobody was told."""
        failed, self._failed = self._failed, []
        return failed

    def fork(self, leader: Sequence) -> list[Sequence]:
        """Give the followers of a leader whose prompt is computed the same blocks; they run from now on.

        Returns those that got one. Before the next schedule() each needs its first token, chosen from the leader's
        logits.
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
        """After a pass that failed: no block holds what it should, so all that run wait and are computed anew."""
        self.pages.clear_prefixes()
        self._tried = None
        while self.running:
            self._suspend(self.running[-1])

    def isolate(self, sequences: Iterable[Sequence]) -> None:
        """After restart(), to find out whose fault it was: each of these has passes of its own before anybody goes on.

        The last of them is one in which it decodes, as that is when there are drafts.
        """
        self._suspects = dict.fromkeys(sequence for sequence in sequences if not sequence.is_finished)

    def _next_suspect(self) -> Sequence | None:
        """Whose pass alone is next; who has been through the one before it without a failure goes free."""
        if self._tried is not None:
            self._suspects.pop(self._tried, None)
        suspect = next(iter(self._suspects), None)
        self._tried = suspect if suspect is not None and suspect.decodes else None
        return suspect

    # -- in and out ------------------------------------------------------------------------------------

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
        """It alone met an error; see take_failed."""
        self.remove(sequence, "failed", error)
        self._failed.append(sequence)
