"""Drafts the tokens that the constraint of an answer leaves no choice about, such as the names in a JSON object."""

from __future__ import annotations

from collections import abc

from ...sequence import Draft, Sequence
from .drafter import Drafter


class ForcedDrafter(Drafter):
    """Proposes the tokens that alone may follow. They are verified as others are, and the masks allow nothing else."""

    name = "forced"
    is_free = True

    def drafts_for(self, sequence: Sequence) -> bool:
        return sequence.constraint is not None

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        return [self._draft(*each) for each in zip(sequences, lengths, strict=True)]

    def _draft(self, sequence: Sequence, length: int) -> Draft:
        if length < 1 or sequence.constraint is None:
            return Draft()
        return Draft(sequence.constraint.forced(sequence.tokens[sequence.num_prompt :])[:length], source=self.name)
