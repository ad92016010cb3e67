"""The hidden states that passes hand on, until a drafter reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ....fused.state_rows import StateRows
from ...sequence import Sequence

Reader = TypeVar("Reader")
MOST_WAITING = 4096  # tokens whose states wait to be read while nothing is drafted; beyond these the first are dropped


@dataclass
class UnreadStates(Generic[Reader]):
    """The hidden states of the tokens start..end-1 of a sequence, which `reader` has not read yet.

    first: the first token whose state the reader has read or will read. parts: these states, end to end.
    """

    reader: Reader
    first: int
    start: int
    parts: list[StateRows]
    count: int = 0  # the rows of all parts, which are many while nothing is drafted

    def __post_init__(self) -> None:
        self.count = sum(map(len, self.parts))

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def num_read(self) -> int:
        return self.start - self.first

    def add(self, start: int, states: StateRows) -> bool:
        """Add the states of tokens from `start` on, in place of later ones. Returns False if some are missing."""
        self.cut(start)
        known = self.start + self.count - start
        if known < 0:
            return False
        if known < states.count:
            self.parts.append(states.part(known, states.count - known))
            self.count += states.count - known
        return True

    def cut(self, end: int) -> None:
        """Drop the states at `end` and behind, which are those of drafted tokens that were rejected."""
        dropped = min(self.count, self.start + self.count - end)
        if dropped > 0:
            self.parts, self.count = self.beginning(self.count - dropped), self.count - dropped

    def beginning(self, count: int) -> list[StateRows]:
        """Return the first `count` states."""
        if count == self.count:
            return self.parts
        found = list[StateRows]()
        for part in self.parts:
            if count <= 0:
                break
            found.append(part.part(0, min(count, part.count)))
            count -= part.count
        return found

    def take(self, count: int) -> list[StateRows]:
        """Return the first `count` states, which count as read from now on."""
        taken, rest = self.beginning(count), list[StateRows]()
        behind = self.count - count  # of the states that stay, those that are not found yet
        for part in reversed(self.parts if behind else []):
            if behind <= 0:
                break
            kept = min(behind, part.count)
            rest.insert(0, part.part(part.count - kept, kept))
            behind -= kept
        self.start, self.count, self.parts = self.start + count, self.count - count, rest
        return taken


class StatesBook(Generic[Reader]):
    """The states of many sequences that wait to be read.

    A sequence whose first tokens came from a shared prefix has no states of them: its reader begins behind these, and
    so it does where too many states have waited.

    begin: makes the reader of a sequence. end: frees one.
    """

    def __init__(self, begin: Callable[[], Reader], end: Callable[[Reader], None] = lambda reader: None) -> None:
        self.begin, self.end = begin, end
        self._unread: dict[Sequence, UnreadStates[Reader]] = {}

    def watch(self, sequence: Sequence, start: int, states: StateRows) -> None:
        """Take the states of tokens from `start` on, for the sequence and its followers."""
        for each in (sequence, *sequence.followers):
            unread = self._unread.get(each)
            if unread is None or not unread.add(start, states):
                unread = self._begun(each, start, [states])
            if unread.count > MOST_WAITING:
                unread.take(unread.count - MOST_WAITING // 2)
                self._begun(each, unread.start, unread.parts)

    def _begun(self, sequence: Sequence, start: int, states: list[StateRows]) -> UnreadStates[Reader]:
        self.forget(sequence)
        unread = self._unread[sequence] = UnreadStates(self.begin(), start, start, states)
        return unread

    def ready(self, sequence: Sequence) -> UnreadStates[Reader] | None:
        """Return the states of a sequence that decodes; None if nothing is new, or some of its tokens have none."""
        unread = self._unread.get(sequence)
        if unread is None:
            return None
        unread.cut(sequence.num_computed)
        return unread if unread.parts and unread.end == sequence.num_computed else None

    def forget(self, sequence: Sequence) -> None:
        unread = self._unread.pop(sequence, None)
        if unread is not None:
            self.end(unread.reader)
