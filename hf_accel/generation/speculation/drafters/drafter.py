"""What proposes the tokens that a pass of the model then verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc

from ...sequence import Draft, Sequence


class Drafter(ABC):
    """Proposes tokens for many sequences at once. What it knows of a sequence it learns from `sequence.tokens`, which
    only ever grow; rejected drafts never stand there.

    name: of the source, of which acceptance and cost are learnt. is_free: it costs no pass of any model.
    """

    name: str
    is_free: bool = False

    @abstractmethod
    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        """A Draft for each sequence, of at most lengths[i] tokens; fewer, or none, where nothing is known.

        How long a draft is may depend on distributions and on earlier tokens, never on the value of a token drawn
        (Draft.probabilities): dropping it would change the distribution of the output.
        """

    def catch_up(self, sequences: abc.Sequence[Sequence]) -> None:  # noqa: B027 - most have nothing to catch up with
        """Called before `propose`: take in what the sequences have grown by (the K and V of a prompt, say). What is
        done here instead of there does not count as the cost of a drafted token."""

    def forget(self, sequence: Sequence) -> None:  # noqa: B027 - most have nothing to free
        """The sequence has ended: free what is held for it. Unknown sequences are ignored."""
