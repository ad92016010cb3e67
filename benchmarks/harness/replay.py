"""Drafts of any acceptance by position: what a head drafts, with the tokens put right as often as was measured."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hf_accel import Draft, Drafter
from hf_accel.generation.sequence import Shape
from hf_accel.generation.speculation.drafters.target_states import HeadDrafter

Known = Mapping[tuple[int, ...], list[int]]  # from prompts to what the model generates after them


class Replay:
    """Makes drafts right as often as is wanted, in their own shape.

    Whether a token is right depends on the seed, the prompt and its position alone: two runs see the same.

    acceptances: by position in the draft, if all before were right; the last one also for those behind it. siblings:
    the part of what the first of siblings misses that the others have.
    """

    def __init__(
        self, known: Known, *, acceptances: Sequence[float], siblings: float, vocabulary: int, seed: int = 0
    ) -> None:
        self.known, self.acceptances, self.siblings = known, acceptances, siblings
        self.vocabulary, self.seed = vocabulary, seed

    def rewritten(self, sequence: Any, draft: Draft) -> Draft:
        prompt = tuple(sequence.tokens[: sequence.num_prompt])
        right, parents = self.known[prompt], draft.parents or range(-1, len(draft) - 1)
        children: dict[int, list[int]] = {}
        for index, parent in enumerate(parents):
            children.setdefault(parent, []).append(index)
        place, depth, taken = sequence.num_new, 0, -1
        # All are wrong, siblings each in its own way, but those of one branch.
        tokens = [(draft.tokens[index] + 1) % self.vocabulary for index in range(len(draft))]
        for own in children.values():
            for number, index in enumerate(own, 1):
                level = place + draft.depths[index + 1] - 1
                tokens[index] = (right[level] + number) % self.vocabulary if level < len(right) else tokens[index]
        while taken in children and place + depth < len(right):
            chosen = self._chosen(f"{self.seed} {prompt} {place + depth}", depth, len(children[taken]))
            if chosen is None:
                break
            taken = children[taken][chosen]
            tokens[taken] = right[place + depth]
            depth += 1
        return Draft(tokens, parents=draft.parents, source=draft.source)

    def _chosen(self, key: str, depth: int, count: int) -> int | None:
        """Return which of `count` siblings is right; None for none."""
        drawn, first = random.Random(key).random(), self.acceptances[min(depth, len(self.acceptances) - 1)]
        if drawn < first:
            return 0
        return 1 if count > 1 and drawn < first + (1 - first) * self.siblings else None


class OracleTree(Drafter):
    """Trees that cost nothing: a chain, and `siblings` - 1 more tokens beside each of its first ones."""

    name = "oracle tree"
    is_free = True
    trees = True
    siblings = 2

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def propose(self, sequences: Sequence[Any], lengths: Sequence[int]) -> list[Draft]:
        return self.propose_trees(sequences, [Shape(length, length) for length in lengths])

    def propose_trees(self, sequences: Sequence[Any], shapes: Sequence[Shape]) -> list[Draft]:
        return [
            self.replay.rewritten(sequence, Draft([0] * len(parents), parents=parents))
            for sequence, parents in zip(sequences, map(self._parents, shapes), strict=True)
        ]

    def _parents(self, shape: Shape) -> tuple[int, ...]:
        """A level of siblings after the other, each behind the first of the level before."""
        parents, first, spare = list[int](), -1, shape.nodes - shape.depth
        for _ in range(shape.depth):
            own = 1 + min(spare, self.siblings - 1)
            spare -= own - 1
            parents += [first] * own
            first = len(parents) - own
        return tuple(parents)


@contextmanager
def replayed(replay: Replay) -> Iterator[None]:
    """Let heads draft as ever, and put their tokens right behind that: what it costs is what the head costs."""
    proposed = HeadDrafter._proposed

    def rewritten(self: HeadDrafter, sequences: Any, shapes: Any) -> list[Draft]:
        drafts = proposed(self, sequences, shapes)
        return [replay.rewritten(sequence, draft) for sequence, draft in zip(sequences, drafts, strict=True)]

    HeadDrafter._proposed = rewritten  # type: ignore[method-assign]
    try:
        yield
    finally:
        HeadDrafter._proposed = proposed  # type: ignore[method-assign]
