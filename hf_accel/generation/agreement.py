"""The decisions that processes which run one model take together, so that each of them computes the same passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class ProcessAgreement:
    """One process, which agrees with itself.

    With several, each runs the same program. Their decisions are then a function of the tokens, except for those that
    depend on time, on free memory, or on random numbers without a seed. Such a decision asks `agree` first: if the
    processes decided differently, they would wait for each other for ever.
    """

    size = 1
    leads = True  # whether the word of this process counts
    timeout = float("inf")  # seconds that a process waits for the others

    def agree(self, value: T) -> T:
        """Return the value of the process that leads, in all processes. All call it, in the same order."""
        return value

    def least(self, number: int) -> int:
        """Return the least of all processes' numbers."""
        return number

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Within the block, raise LostRankError instead of torch's error for a process that does not answer."""
        yield


ALONE = ProcessAgreement()
