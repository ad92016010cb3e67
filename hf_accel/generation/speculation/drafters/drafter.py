"""The interface of drafters, which propose the tokens that a pass of the model verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from typing import TYPE_CHECKING

from ...sequence import Draft, Sequence, Shape

if TYPE_CHECKING:
    from torch import Tensor

    from ....fused.state_rows import StateRows


# The acceptance that is expected of a drafter of which nothing is known, and of one that was trained with its target's
# states.
UNKNOWN, TRAINED = 0.3, 0.6
FEW = 16  # the most tokens that a draft is asked for together with; more are read ahead of it


class Drafter(ABC):
    """Proposes tokens for many sequences at once.

    A drafter reads `sequence.tokens`. This list only grows, and rejected tokens are never in it.

    name: identifies the drafter; acceptance and cost are learnt for each name. is_free: whether it needs no pass of a
    model. layers: the hidden states that `watch` is called with, as indices into those that transformers returns.
    trees: whether it proposes trees, by `propose_trees`, where the model can verify them. expected: the acceptance of
    a first token that is expected before any was verified.
    """

    name: str
    is_free: bool = False
    layers: tuple[int, ...] = ()
    trees: bool = False
    expected: float = UNKNOWN

    def drafts_for(self, sequence: Sequence) -> bool:
        """Return whether this sequence may get a draft; it is not asked for one, and learns nothing, where not."""
        return True

    def drafts_trees(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Return whether `propose_trees` is asked for drafts of these sequences, and not `propose`."""
        return self.trees

    @abstractmethod
    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        """Return a Draft for each sequence, of at most lengths[i] tokens. It may be shorter or empty.

        The length of a draft may depend on distributions and on earlier tokens. It must not depend on the value of a
        token that was drawn (see Draft.probabilities): to drop such a token would change the output's distribution.
        """

    def propose_trees(self, sequences: abc.Sequence[Sequence], shapes: abc.Sequence[Shape]) -> list[Draft]:
        """Return a Draft with parents for each sequence, which is at most as large as shapes[i].

        Of two tokens, the one that is likelier to be accepted comes first.
        """
        return self.propose(sequences, [shape.depth for shape in shapes])

    def catch_up(self, sequences: abc.Sequence[Sequence]) -> None:  # noqa: B027 - most have nothing to catch up with
        """Process the new tokens of the sequences, for example compute the K and V of a prompt.

        This is called before `propose`. Its time does not count as the cost of drafted tokens.
        """

    def watch(self, sequence: Sequence, start: int, states: Tensor) -> None:  # noqa: B027 - most read none
        """Take the hidden states of tokens from index `start` on, which a pass has computed, drafted ones included.

        states: [n, D], those of `layers` side by side.
        """

    def watch_rows(self, sequence: Sequence, start: int, rows: StateRows) -> None:
        """Take hidden states as `watch` does, before they are put side by side, which takes time in each pass."""
        self.watch(sequence, start, rows.tensor())

    def forget(self, sequence: Sequence) -> None:  # noqa: B027 - most have nothing to free
        """Free what is held for a sequence, because it has ended. Unknown sequences are ignored."""


def copy_from(tokens: abc.Sequence[int], start: int, count: int) -> list[int]:
    """Copy `count` tokens from index `start` on. At the end of `tokens` the copy continues with itself, as in LZ77:
    it repeats with a period of len(tokens) - start.
    """
    found = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(found) < count:
        found += found[len(found) - period : len(found) - period + count - len(found)]
    return found
