"""transformers' CandidateGenerators as a Drafter."""

from __future__ import annotations

import copy
import itertools
from collections import abc
from typing import Any

import torch

from ..sequence import Draft, Sequence
from ..speculation.drafters.drafter import Drafter


class CandidateDrafter(Drafter):
    """A CandidateGenerator for each sequence: a copy of the one given, models aside, or what a function without
    arguments makes. num_tokens: the model's vocabulary; candidates beyond it, of a padded one, end a draft.

    Its candidates count as looked up, whatever scores come with them. Keeping each with the probability that the model
    itself gives it is exact for any candidate, whatever distribution it was drawn from, and some generators hand out
    the scores of a distribution that they did not draw from.
    """

    name = "candidates"

    def __init__(self, generator: Any, num_tokens: int) -> None:
        self.make = (lambda: _copied(generator)) if hasattr(generator, "get_candidates") else generator
        self.num_tokens = num_tokens
        self._generators: dict[Sequence, Any] = {}
        self._proposed: dict[Sequence, tuple[int, int]] = {}

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        return [self._one(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]

    def _one(self, sequence: Sequence, length: int) -> Draft:
        if not length:
            return Draft()
        generator = self._generators.get(sequence)
        if generator is None:
            generator = self._generators[sequence] = self.make()
        ids = torch.tensor([sequence.tokens], dtype=torch.int64)
        self._tell(generator, sequence, ids)
        candidates = generator.get_candidates(ids)[0][0, len(sequence.tokens) :].tolist()[:length]
        candidates = list(itertools.takewhile(lambda token: 0 <= token < self.num_tokens, candidates))
        self._proposed[sequence] = len(sequence.tokens), len(candidates)
        return Draft(candidates)

    def _tell(self, generator: Any, sequence: Sequence, ids: torch.Tensor) -> None:
        """Some adapt to how many of their last candidates were right."""
        start, count = self._proposed.pop(sequence, (0, 0))
        if count:
            matches = min(count, len(sequence.tokens) - start - 1)
            scores = torch.empty(1, count + 1, 1)  # only its length is looked at
            generator.update_candidate_strategy(ids, scores, matches)

    def forget(self, sequence: Sequence) -> None:
        self._generators.pop(sequence, None)
        self._proposed.pop(sequence, None)


def _copied(generator: Any) -> Any:
    return copy.deepcopy(generator, {id(m): m for m in vars(generator).values() if isinstance(m, torch.nn.Module)})
