"""The interface of verifiers. They accept drafted tokens so that the output has the model's distribution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from dataclasses import dataclass

from torch import Tensor

from ....errors import UnsupportedError
from ....tensors import Unread
from ...sequence import Draft


@dataclass(frozen=True)
class Place:
    """Identifies the random numbers for the token at `position` (among all tokens) of a sequence with this `seed`.

    offset: the number of new tokens of the same pass before it. A rejected position is drafted again in a later pass,
    with a smaller offset because every pass adds a token. So a pair (position, offset) never occurs twice.
    """

    seed: int
    position: int
    offset: int = 0

    def next(self, count: int = 1) -> Place:
        return Place(self.seed, self.position + count, self.offset + count)


class Verifier(ABC):
    """Accepts a prefix of each draft and adds exactly one token.

    Random numbers are functions of the Place and of their purpose, so neither the batch nor preemption changes them.
    With drafts that were not drawn (Draft.probabilities is None), the tokens are those that the same seed gives
    without drafts.
    """

    name: str
    draws: int  # the kind of kernels.cpu.draws that draws drafted tokens

    @abstractmethod
    def draft_number(self, place: Place) -> float:
        """Return the random number by which `draws` draws the drafted token of a place; an int for a race."""

    @abstractmethod
    def drawn(self, probabilities: Tensor, places: abc.Sequence[Place]) -> Unread[list[int]]:
        """Draw a drafted token from each row of probabilities [n, V] float32.

        places: for drafted token j of a sequence, `first.next(j)`, where `first` is the Place that `verified` gets for
        this sequence. If there are numbers to read, the first n of them are the tokens, except for the rare ones that
        are drawn again when they are read.
        """

    @abstractmethod
    def verified(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]
    ) -> Unread[list[list[int]]]:
        """For each sequence, the accepted tokens of its draft and one more.

        probabilities: the model's, [sum(len(draft) + 1), V] float32, after all processing. The rows of a sequence are
        consecutive, one for each row of its draft: the distribution of the token after that. places: the Place of each
        sequence's first new token. Of a tree, the drafted tokens that equal the model's own are accepted. With an
        empty draft, a token is drawn as without speculation.
        """

    def candidates(self, probabilities: Tensor, places: abc.Sequence[Place], count: int) -> list[list[int]]:
        """Return for each row of a draft's probabilities [n, V] the tokens that are likeliest to be the model's own.

        They are siblings of a tree, the likeliest first. places: as `drawn` takes them. count: the most of each.
        """
        values, ids = probabilities.topk(min(count, probabilities.shape[1]), dim=-1)
        rows = zip(values.tolist(), ids.tolist(), strict=True)
        return [[token for value, token in zip(*row, strict=True) if value > 0] for row in rows]

    def draw(self, probabilities: Tensor, places: abc.Sequence[Place]) -> list[int]:
        """Return what `drawn` describes; the host waits for the device."""
        return self.drawn(probabilities, places).read()

    def verify(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]
    ) -> list[list[int]]:
        """Return what `verified` describes; the host waits for the device."""
        return self.verified(probabilities, drafts, places).read()


def first_rows(probabilities: Tensor, drafts: abc.Sequence[Draft]) -> list[int]:
    """Return the row of `probabilities` from which each sequence's first new token is drawn.

    Raises UnsupportedError if the drafts do not match the shape of `probabilities`.
    """
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


def row_places(places: abc.Sequence[Place], drafts: abc.Sequence[Draft]) -> list[Place]:
    """Return the Place of the token after each row of each draft. places: of each sequence's first new token."""
    return [place.next(depth) for place, draft in zip(places, drafts, strict=True) for depth in draft.depths]


def accepted_of(drafts: abc.Sequence[Draft], chosen: list[int]) -> list[list[int]]:
    """Return Draft.accepted for each draft. chosen: the model's own tokens for all drafts, end to end."""
    kept, row = [], 0
    for draft in drafts:
        kept.append(draft.accepted(chosen[row : row + len(draft) + 1]))
        row += len(draft) + 1
    return kept
