"""Drafts between scheduler and model: slots, budgets, cascades, what is counted, and what a bad drafter does."""

from __future__ import annotations

import json
from collections import abc
from typing import Any

import pytest
import torch

from hf_accel.errors import HfAccelError
from hf_accel.generation.batcher import Batcher
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import NO_SHAPE, Draft, Sequence
from hf_accel.generation.speculation.controller import Controller
from hf_accel.generation.speculation.draft_sources import DraftPlan, DraftSource
from hf_accel.generation.speculation.drafters.drafter import Drafter
from hf_accel.generation.speculation.speculation import Speculation, SpeculationStatistics
from hf_accel.generation.speculation.verifiers import verifier

from ..asking import request_sampling
from ..toy import VOCABULARY, ToyRunner, next_logits, sequential, toy_pages


class Scripted(Drafter):
    """right: how many of its tokens are what the model says. most: proposes no more."""

    def __init__(self, name: str = "scripted", right: int = 99, most: int = 99, *, is_free: bool = True) -> None:
        self.name, self.right, self.most, self.is_free = name, right, most, is_free
        self.asked: list[list[int]] = []
        self.forgotten: list[Sequence] = []

    def propose(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> list[Draft]:
        self.asked.append(list(lengths))
        return [self.one(*each) for each in zip(sequences, lengths, strict=True)]

    def one(self, sequence: Sequence, length: int) -> Draft:
        tokens: list[int] = []
        for number in range(min(length, self.most)):
            best = int(next_logits(sequence.tokens + tokens, None).argmax())
            tokens.append(best if number < self.right else (best + 1) % VOCABULARY)
        return Draft(tokens)

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)


def batcher_of(*drafters: Drafter, num_draft: Any = 4, num_blocks: int = 100, **more: Any) -> Batcher:
    pages = toy_pages(num_blocks, block_size=4, window=None)
    speculation = Speculation(verifier("token"), drafters, Controller(num_draft))
    return Batcher(ToyRunner(pages), pages, speculation, **more)


def add(batcher: Batcher, *prompts: list[int], new_tokens: int = 13, **fields: Any) -> list[Sequence]:
    sequences = [Sequence(list(prompt), RequestSettings(new_tokens, Sampling(), **fields)) for prompt in prompts]
    for sequence in sequences:
        batcher.add(sequence)
    return sequences


def alone(prompt: list[int], new_tokens: int = 13) -> list[int]:
    return sequential(
        prompt, RequestSettings(new_tokens, Sampling()), seed=0, verifier=verifier("token"), window=None
    )[0]


def finish(batcher: Batcher) -> None:
    while batcher.has_work:
        batcher.step()


@pytest.mark.parametrize("right", range(6))
def test_counts(right: int) -> None:
    drafter = Scripted(right=right)
    batcher = batcher_of(drafter)
    [sequence] = add(batcher, [1, 2, 3])
    finish(batcher)
    assert sequence.tokens[3:] == alone([1, 2, 3])
    statistics = batcher.speculation.statistics
    per_pass = min(right, 4) + 1
    assert batcher.num_passes == statistics.passes == statistics.steps == 1 + -(-12 // per_pass)
    assert statistics.tokens == 13 and statistics.accepted == 13 - statistics.steps
    assert drafter.forgotten == [sequence]


def test_nothing_is_drafted_beyond_the_last_token() -> None:
    drafter = Scripted()
    batcher = batcher_of(drafter)
    add(batcher, [1, 2, 3], new_tokens=4)
    finish(batcher)
    assert drafter.asked == [[2]]  # one token from the prompt's pass, two drafted, one after them


def test_drafts_take_what_the_budget_leaves() -> None:
    drafter = Scripted()
    batcher = batcher_of(drafter, token_budget=6)
    sequences = add(batcher, [1], [2], [3])
    while batcher.has_work:
        before = batcher.runner.num_rows  # type: ignore[attr-defined]
        batcher.step()
        assert batcher.runner.num_rows - before <= 6  # type: ignore[attr-defined]
    assert drafter.asked[0] == [3]  # three rows decode, three rows are left, in order
    assert [s.tokens[1:] for s in sequences] == [alone([1]), alone([2]), alone([3])]


def test_nobody_is_preempted_for_drafts() -> None:
    """Two sequences fill three blocks each at their end, and there are six."""
    drafter = Scripted(right=0)
    batcher = batcher_of(drafter, num_blocks=6, num_draft=40)
    sequences = add(batcher, [1, 2, 3], [4, 5, 6], new_tokens=9)
    finish(batcher)
    assert batcher.scheduler.num_preempted == 0 and sum(map(sum, drafter.asked)) > 0
    assert [s.tokens[3:] for s in sequences] == [alone([1, 2, 3], 9), alone([4, 5, 6], 9)]


def test_a_cascade_asks_the_free_first_and_the_next_for_what_they_lack() -> None:
    model, silent = Scripted("model", is_free=False), Scripted("silent", most=0)
    batcher = batcher_of(model, silent)
    add(batcher, [1, 2, 3])
    finish(batcher)
    assert batcher.speculation.drafters == [silent, model]
    assert silent.asked == model.asked and len(model.asked) > 1
    talkative = Scripted("talkative")
    batcher = batcher_of(model, talkative)
    model.asked.clear()
    add(batcher, [1, 2, 3])
    finish(batcher)
    assert talkative.asked and not model.asked
    assert set(batcher.speculation.controller.sources) == {"talkative"}


def test_slots_that_a_short_draft_does_not_need_go_back() -> None:
    batcher = batcher_of(Scripted(most=1), num_draft=30)
    [sequence] = add(batcher, [1, 2, 3], new_tokens=60)
    batcher.step()
    for _ in range(5):
        batcher.step()
        assert sequence.cached is not None and sequence.cached.num_tokens == sequence.num_computed
        assert batcher.pages.groups[0].pool.num_used == -(-sequence.num_computed // 4)


class TooLong(Scripted):
    def one(self, sequence: Sequence, length: int) -> Draft:
        return Draft([1] * (length + 1))


class WrongShape(Scripted):
    def one(self, sequence: Sequence, length: int) -> Draft:
        return Draft([1] * length, torch.ones(length, 3) / 3)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [(TooLong("long"), "'long' proposed 5 tokens where 4 were asked for"), (WrongShape(), "have 12 columns")],
)
def test_bad_drafters_are_told_what_they_did(drafter: Drafter, message: str) -> None:
    batcher = batcher_of(drafter)
    sampling = request_sampling(temperature=1.0)
    sequence = Sequence([1, 2, 3], RequestSettings(9, sampling))
    batcher.add(sequence)
    batcher.step()
    tokens = list(sequence.tokens)
    with pytest.raises(HfAccelError, match=message):
        batcher.step()
    assert sequence.tokens == tokens and sequence.cached is None  # it could go on, computed anew
    assert batcher.pages.groups[0].pool.num_used == 0


# -- statistics --------------------------------------------------------------------------------------------


def statistics_of(*steps: tuple[int, int]) -> SpeculationStatistics:
    statistics = SpeculationStatistics()
    for drafted, accepted in steps:
        statistics.record_step(drafted, accepted, accepted + 1)
    statistics.record_pass(drafting_seconds=0.25, verifying_seconds=1.0)
    return statistics


def test_counts_by_position() -> None:
    found = statistics_of((3, 1), (3, 3), (1, 0), (0, 0)).to_dict()
    assert found == {
        "passes": 1,
        "steps": 4,
        "tokens": 8,
        "tokens_per_pass": 2.0,
        "drafted": 7,
        "accepted": 4,
        "acceptance": 4 / 7,
        "drafted_at": [3, 2, 2],
        "accepted_at": [2, 1, 1],
        "acceptance_at": [2 / 3, 0.5, 0.5],
        "branched": 0,
        "no_trees": None,
        "draft_lengths": {"0": 1, "1": 1, "3": 2},
        "drafting_seconds": 0.25,
        "verifying_seconds": 1.0,
    }
    assert "[3, 2, 2]" in json.dumps(found), "whole numbers"


def test_nothing_is_json_too() -> None:
    for statistics in (SpeculationStatistics(), statistics_of((3, 0)), statistics_of((0, 0))):
        assert json.loads(json.dumps(statistics.to_dict())) == statistics.to_dict()
    assert SpeculationStatistics().to_dict()["acceptance"] is None
    assert statistics_of((3, 0)).to_dict()["accepted_at"] == [0, 0, 0]


def test_a_stop_within_the_accepted_tokens_counts_what_stayed() -> None:
    statistics = SpeculationStatistics()
    statistics.record_step(4, 4, 2)
    assert statistics.to_dict()["tokens_per_pass"] == 2 and statistics.accepted == 4


def test_more_accepted_than_drafted_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 tokens accepted of 2"):
        SpeculationStatistics().record_step(2, 3, 4)


def test_drafters_that_rest_are_asked_nothing_and_no_states_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Scripted(is_free=False)
    drafter.layers = (-1,)
    batcher = batcher_of(drafter, num_draft="auto")
    speculation, kept = batcher.speculation, list[bool]()
    assert speculation is not None
    speculation.states, speculation.keep_states = lambda: torch.zeros(1, 1), kept.append
    plan = DraftPlan([Sequence([1], RequestSettings(9, sampling=None))], 1, shapes=[NO_SHAPE], until=100)  # type: ignore[arg-type]
    speculation.controller.sources[drafter.name] = DraftSource(plan=plan)
    [sequence] = add(batcher, [1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(Controller, "shapes", lambda *args, **settings: pytest.fail("it was asked"))
        for _ in range(5):
            batcher.step()
    assert kept == [False] * 5 and not drafter.asked and len(sequence.tokens) == 8
    finish(batcher)
    assert sequence.tokens[3:] == alone([1, 2, 3])


def test_the_choice_of_lengths_is_no_time_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes without drafts ask each time, and would look slower than those with a plan that holds."""
    clock = [0.0]
    monkeypatch.setattr("hf_accel.generation.speculation.speculation.now", lambda: clock[0])
    shapes, batcher = Controller.shapes, batcher_of(Scripted(right=0), num_draft="auto")

    def slowly(self: Controller, *arguments: Any, **keywords: Any) -> Any:
        clock[0] += 5.0
        return shapes(self, *arguments, **keywords)

    runner = batcher.runner
    call = type(runner).__call__

    def timed(self: Any, *arguments: Any, **keywords: Any) -> Any:
        clock[0] += 1.0
        return call(self, *arguments, **keywords)

    monkeypatch.setattr(Controller, "shapes", slowly)
    monkeypatch.setattr(type(runner), "__call__", timed)
    add(batcher, [1, 2, 3], new_tokens=30)
    finish(batcher)
    speculation = batcher.speculation
    assert speculation.controller.verify_costs.seconds(1) == pytest.approx(1.0)
    assert speculation.controller.sources["scripted"].keeping == pytest.approx(5.0)
