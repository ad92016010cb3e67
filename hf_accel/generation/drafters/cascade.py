"""Several drafters, of which a sequence takes the first that has something to say."""

from __future__ import annotations

from collections import abc
from dataclasses import replace

from ...errors import UnsupportedError
from ..sequence import Sequence
from .base import Draft, Drafter


class Cascade(Drafter):
    """Asks each drafter, in one call, for the sequences that no drafter before it had a proposal for.

    Those that cost nothing go first, in the order given: after a model, which always has a proposal, they would never
    be asked. Draft.source says whose a draft is. `Drafting` asks them one by one, with lengths for each.
    """

    name = "cascade"

    def __init__(self, drafters: abc.Sequence[Drafter]) -> None:
        if not drafters:
            raise UnsupportedError("a cascade of no drafters proposes nothing; give at least one")
        self.drafters = sorted(drafters, key=lambda drafter: not drafter.is_free)
        self.is_free = all(drafter.is_free for drafter in drafters)

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        drafts = [Draft() for _ in sequences]
        waiting = [i for i, length in enumerate(lengths) if length > 0]
        for drafter in self.drafters:
            if not waiting:
                break
            asked = drafter.propose([sequences[i] for i in waiting], [lengths[i] for i in waiting])
            for i, draft in zip(waiting, asked, strict=True):
                drafts[i] = replace(draft, source=draft.source or drafter.name)
            waiting = [i for i in waiting if not drafts[i].tokens]
        return drafts

    def forget(self, sequence: Sequence) -> None:
        for drafter in self.drafters:
            drafter.forget(sequence)
