"""Which drafted tokens stay, so that the output's law is the model's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from dataclasses import dataclass

from torch import Tensor

from ..drafters.base import Draft


@dataclass(frozen=True)
class Place:
    """Where random numbers are needed: for the token at `position` (of all tokens) of a sequence with this `seed`."""

    seed: int
    position: int

    def next(self, count: int = 1) -> Place:
        return Place(self.seed, self.position + count)


class Verifier(ABC):
    """Keeps a beginning of each draft and adds exactly one token.

    Random numbers are functions of (seed, position, purpose), so that neither the batch nor a preemption changes them.
    """

    name: str

    @abstractmethod
    def draw(self, probabilities: Tensor, places: abc.Sequence[Place]) -> list[int]:
        """Draft a token from each row of [n, V] float32. `verify` on the same places stays exact."""

    @abstractmethod
    def verify(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]
    ) -> list[list[int]]:
        """For each sequence the accepted tokens of its draft and one more.

        probabilities: the model's [sum(len(draft) + 1), V] float32 after all processing, the rows of one sequence
        after the other: row j of a sequence is the law of the token after its first j drafted ones.
        places: of each sequence's first new token. An empty draft is plain sampling.
        """
