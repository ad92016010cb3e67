"""Who waits to be computed, and who is next."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from ..sequence import Sequence

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
