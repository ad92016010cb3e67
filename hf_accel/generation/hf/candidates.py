"""A Drafter that uses transformers' CandidateGenerators."""

from __future__ import annotations

import copy
import itertools
from collections import abc
from typing import Any

import torch

from ..sequence import Draft, Sequence
from ..speculation.drafters.drafter import Drafter


class CandidateDrafter(Drafter):
    """Drafts with a CandidateGenerator for each sequence.

    generator: a CandidateGenerator, which is copied for each sequence without copying its models; or a function
    without arguments that makes one. num_tokens: the size of the target's vocabulary; a candidate beyond it ends the
    draft.

    The scores that a generator returns are not used, and the candidates count as not drawn. Each is then accepted with
    the probability that the model gives it, which is exact for any candidate. The scores would not be safe to use:
    some generators return the scores of a distribution from which they did not draw.
    """

    name = "candidates"

    def __init__(self, generator: Any, num_tokens: int) -> None:
        self.make = (lambda: _copied(generator)) if hasattr(generator, "get_candidates") else generator
        self.num_tokens = num_tokens
        self._generators: dict[Sequence, Any] = {}
        self._proposed: dict[Sequence, tuple[int, int]] = {}

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        return [self._draft(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]

    def _draft(self, sequence: Sequence, length: int) -> Draft:
        if not length:
            return Draft()
        generator = self._generators.get(sequence)
        if generator is None:
            generator = self._generators[sequence] = self.make()
        ids = torch.tensor([sequence.tokens], dtype=torch.int64)
        self._report_acceptance(generator, sequence, ids)
        candidates = generator.get_candidates(ids)[0][0, len(sequence.tokens) :].tolist()[:length]
        candidates = list(itertools.takewhile(lambda token: 0 <= token < self.num_tokens, candidates))
        self._proposed[sequence] = len(sequence.tokens), len(candidates)
        return Draft(candidates)

    def _report_acceptance(self, generator: Any, sequence: Sequence, ids: torch.Tensor) -> None:
        """Tell the generator how many of its last candidates were accepted. Some generators adapt to that."""
        start, count = self._proposed.pop(sequence, (0, 0))
        if count:
            matches = min(count, len(sequence.tokens) - start - 1)
            scores = torch.empty(1, count + 1, 1)  # generators use only its length
            generator.update_candidate_strategy(ids, scores, matches)

    def forget(self, sequence: Sequence) -> None:
        self._generators.pop(sequence, None)
        self._proposed.pop(sequence, None)


def _copied(generator: Any) -> Any:
    return copy.deepcopy(generator, {id(m): m for m in vars(generator).values() if isinstance(m, torch.nn.Module)})
