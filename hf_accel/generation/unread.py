"""Results made of numbers that are on a device. They are read together, so that the host waits for the device once."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Unread(Generic[T]):
    """A result that is known when its numbers are.

    numbers: [n] int64, on any device. finish: makes the result of the list of these numbers.
    """

    numbers: Tensor
    finish: Callable[[list[int]], T]

    def then(self, function: Callable[[T], U]) -> Unread[U]:
        """Apply `function` to the result."""
        return Unread(self.numbers, lambda numbers: function(self.finish(numbers)))

    def read(self) -> T:
        """The result. The host waits for the device."""
        return self.finish(self.numbers.tolist())


def known(result: T) -> Unread[T]:
    """A result that needs no number of a device."""
    return Unread(torch.empty(0, dtype=torch.int64), lambda _: result)


def all_unread(results: abc.Sequence[Unread[T]]) -> Unread[list[T]]:
    """The results of many as one, whose numbers are read at once."""
    if len(results) == 1:
        return results[0].then(lambda result: [result])
    counts = [len(result.numbers) for result in results]
    used = [result.numbers for result in results if len(result.numbers)]
    numbers = torch.cat(used) if used else torch.empty(0, dtype=torch.int64)

    def finish(read: list[int]) -> list[T]:
        found, start = [], 0
        for result, count in zip(results, counts, strict=True):
            found.append(result.finish(read[start : start + count]))
            start += count
        return found

    return Unread(numbers, finish)
