"""Which drafted tokens stay, so that the output's distribution is the model's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from dataclasses import dataclass

from torch import Tensor

from ....errors import UnsupportedError
from ...sequence import Draft


@dataclass(frozen=True)
class Place:
    """Where random numbers are needed: for the token at `position` (of all tokens) of a sequence with this `seed`.

    offset: how many new tokens of the same pass lie before it. A position that was rejected comes again in a later
    pass, with a smaller offset, since every pass adds a token: (position, offset) never comes twice.
    """

    seed: int
    position: int
    offset: int = 0

    def next(self, count: int = 1) -> Place:
        return Place(self.seed, self.position + count, self.offset + count)


class Verifier(ABC):
    """Keeps a beginning of each draft and adds exactly one token.

    Random numbers are functions of the place and of what they are for, so that neither the batch nor a preemption
    changes them. With drafts that were not drawn (Draft.probabilities is None) the tokens are those that the same seed
    gives without any draft.
    """

    name: str

    @abstractmethod
    def draw(self, probabilities: Tensor, places: abc.Sequence[Place]) -> list[int]:
        """Draft a token from each row of [n, V] float32. `verify` on the same places stays exact.

        places: for draft token j of a sequence, `first.next(j)` of the Place that `verify` will be given for it.
        """

    @abstractmethod
    def verify(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]
    ) -> list[list[int]]:
        """For each sequence the accepted tokens of its draft and one more.

        probabilities: the model's [sum(len(draft) + 1), V] float32 after all processing, the rows of one sequence
        after the other: row j of a sequence is the distribution of the token after its first j drafted ones.
        places: of each sequence's first new token. An empty draft is plain sampling.
        """


def first_rows(probabilities: Tensor, drafts: abc.Sequence[Draft]) -> list[int]:
    """Of each sequence, the row that its first new token is drawn from. Raises UnsupportedError if shapes disagree."""
    starts, row = [], 0
    for draft in drafts:
        starts.append(row)
        row += len(draft) + 1
        if draft.probabilities is not None and draft.probabilities.shape != (len(draft), probabilities.shape[1]):
            raise UnsupportedError(
                f"a draft of {len(draft)} tokens has probabilities of shape {tuple(draft.probabilities.shape)}; the "
                f"model's have {probabilities.shape[1]} columns: give a row of as many for each token"
            )
    if row != len(probabilities):
        raise UnsupportedError(f"{len(probabilities)} rows of probabilities for drafts that need {row}")
    return starts


def follow(drafts: abc.Sequence[Draft], chosen: list[int]) -> list[list[int]]:
    """Draft.kept for each draft. chosen: the model's own tokens, those of one draft after the other's."""
    kept, row = [], 0
    for draft in drafts:
        kept.append(draft.kept(chosen[row : row + len(draft) + 1]))
        row += len(draft) + 1
    return kept
