"""What the processes that run one model decide together, so that each of them computes the same passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class ProcessAgreement:
    """One process, which agrees with itself.

    With several, each runs the same program. What they decide is then a function of the tokens, but for what depends
    on time, on free memory, or on random numbers without a seed. Whoever decides by these asks `agree` first: if the
    processes decided otherwise from each other, they would wait for each other for ever.
    """

    size = 1
    leads = True  # whether what this process says is what counts
    timeout = float("inf")  # seconds that one waits for the others

    def agree(self, value: T) -> T:
        """The value of the process that leads, in all of them. All call it, in the same order."""
        return value

    def least(self, number: int) -> int:
        """The least of all processes' numbers."""
        return number

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Raise LostRankError in the place of torch's error for a process that does not answer, within the block."""
        yield


ALONE = ProcessAgreement()
