"""A drafter of any acceptance that is wanted: it knows the continuation, and spoils a part of it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from hf_accel import Draft, Drafter


class OracleDrafter(Drafter):
    """Replays known greedy continuations; each token is wrong with probability 1 - acceptance, from a fixed seed.

    Whether a position is spoilt depends on the seed, the prompt and the position alone: the tokens of a draft are
    right independently of each other, whatever their number, and two runs see the same.
    continuations: from prompts (as tuples) to what the model generates after them.
    """

    name = "oracle"
    is_free = True

    def __init__(
        self, continuations: Mapping[tuple[int, ...], list[int]], *, acceptance: float, vocabulary: int, seed: int = 0
    ) -> None:
        self.acceptance = acceptance
        self._proposals = {
            prompt: spoilt(tokens, acceptance, vocabulary, random.Random(f"{seed} {prompt}"))
            for prompt, tokens in continuations.items()
        }

    def propose(self, sequences: Sequence, lengths: Sequence[int]) -> list[Draft]:
        drafts = []
        for sequence, length in zip(sequences, lengths, strict=True):
            proposal = self._proposals[tuple(sequence.tokens[: sequence.num_prompt])]
            drafts.append(Draft(proposal[sequence.num_new : sequence.num_new + length], source=self.name))
        return drafts


def spoilt(tokens: Sequence[int], acceptance: float, vocabulary: int, generator: random.Random) -> list[int]:
    return [token if generator.random() < acceptance else (token + 1) % vocabulary for token in tokens]
