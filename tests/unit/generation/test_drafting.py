from __future__ import annotations

import random
from collections.abc import Sequence as Many

from hf_accel.generation.controller import Controller
from hf_accel.generation.drafters.base import Draft, Drafter
from hf_accel.generation.drafters.cascade import Cascade
from hf_accel.generation.drafters.ngram import NgramDrafter
from hf_accel.generation.drafting import Drafting
from hf_accel.generation.sequence import Sequence


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Model(Drafter):
    """Knows the next token in so many of ten cases; each of its passes takes time."""

    name = "model"

    def __init__(self, clock: Clock, seconds: float, right: int) -> None:
        self.clock, self.seconds, self.right = clock, seconds, right
        self.caught_up: list[int] = []

    def catch_up(self, sequences: Many[Sequence]) -> None:
        self.clock.now += 100.0
        self.caught_up += map(id, sequences)

    def propose(self, sequences: Many[Sequence], lengths: Many[int]) -> list[Draft]:
        self.clock.now += self.seconds * max(lengths)
        return [
            Draft([answer(len(s.tokens) + i, self.right) for i in range(n)])
            for s, n in zip(sequences, lengths, strict=True)
        ]


def answer(position: int, right: int = 10) -> int:
    """The sequence that is generated, or a wrong token at some positions; no 2 neighbours occur twice."""
    return 1000 + position if random.Random(position).randrange(10) < right else 1


def decode(drafting: Drafting, sequences: list[Sequence], steps: int) -> None:
    for _ in range(steps):
        drafts = drafting.propose(sequences, [100] * len(sequences))
        accepted = []
        for sequence, draft in zip(sequences, drafts, strict=True):
            right = 0
            while right < len(draft) and draft.tokens[right] == answer(len(sequence.tokens) + right):
                right += 1
            accepted.append(right)
        rows = sum(map(len, drafts)) + len(sequences)
        for sequence, right in zip(sequences, accepted, strict=True):
            sequence.tokens += [answer(len(sequence.tokens) + i) for i in range(right + 1)]
        drafting.observe(sequences, drafts, accepted, rows=rows, seconds=0.95 + 0.05 * rows)


def test_a_costly_drafter_pays_by_what_it_costs() -> None:
    lengths = {}
    for seconds in (0.02, 0.4, 2.0):
        clock = Clock()
        drafting = Drafting(Model(clock, seconds, right=9), Controller(), clock)
        decode(drafting, [Sequence([1], 10**6, sampling=None)], 200)
        statistics = drafting.statistics
        lengths[seconds] = statistics.drafted / statistics.steps
        assert statistics.passes == statistics.steps == 200
        assert statistics.tokens == statistics.accepted + 200
    assert lengths[0.02] > 5 > 1.0 > lengths[2.0] and lengths[0.02] > lengths[0.4] > lengths[2.0]


def test_catching_up_is_no_part_of_what_a_token_costs() -> None:
    clock = Clock()
    drafting = Drafting(Model(clock, 0.1, right=10), Controller(3), clock)
    decode(drafting, [Sequence([1], 10**6, sampling=None)], 10)
    assert all(abs(s - 0.1) < 1e-9 for s in drafting.controller.draft_costs["model"].to_dict().values())
    assert abs(drafting.statistics.drafting_seconds - 10 * (100 + 0.3)) < 1e-6


def test_each_drafter_of_a_cascade_is_judged_apart() -> None:
    """Lookups find nothing right here, the model does."""
    clock = Clock()
    model = Model(clock, 0.1, right=10)
    wrong = [5, 6] * 4  # the lookup proposes after it ...
    sequences = [Sequence([*wrong], 10**6, sampling=None), Sequence([1], 10**6, sampling=None)]
    drafting = Drafting(Cascade([model, NgramDrafter()]), Controller(2), clock)
    first = drafting.propose(sequences, [9, 9])
    assert [(draft.source, len(draft)) for draft in first] == [("ngram", 2), ("model", 2)]
    assert model.caught_up == [id(sequences[1])]
    drafting.observe(sequences, first, [0, 2], rows=6, seconds=1.0)
    assert drafting.controller.sources["ngram"].deepest == 0
    assert drafting.controller.sources["model"].deepest == 2
    decode(drafting, sequences, 5)
    assert set(drafting.controller.statistics()["draft_seconds"]) == {"model"}


def test_nobody_is_asked_where_nothing_may_be_drafted() -> None:
    clock = Clock()
    model = Model(clock, 0.1, right=10)
    drafting = Drafting(model, Controller(4), clock)
    sequences = [Sequence([1], 9, sampling=None) for _ in range(2)]
    assert drafting.propose(sequences, [0, 0]) == [Draft(), Draft()]
    assert drafting.propose([], []) == [] and clock.now == 0.0
    assert [len(draft) for draft in drafting.propose(sequences, [0, 2])] == [0, 2]
    assert model.caught_up == [id(sequences[1])]
