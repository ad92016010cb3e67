"""What follows from acceptances and costs, against closed forms."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, sqrt
from typing import Any

import pytest
import torch

from hf_accel.distill.drafts.measuring import averaged
from hf_accel.distill.drafts.report import AcceptanceReport, acceptance_for, expected_tokens
from hf_accel.distill.losses.objective import agreement
from hf_accel.generation.sequence import Draft
from hf_accel.generation.speculation.verifiers import verifier
from hf_accel.generation.speculation.verifiers.verifier import Place

P, Q = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)


def logits(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_agreement_is_the_shared_mass() -> None:
    chances, same = agreement(logits(P, P), logits(Q, P), 1.0)
    assert chances.tolist() == pytest.approx([0.7, 1.0])
    assert same.tolist() == [False, True]


def test_agreement_at_a_temperature() -> None:
    chances, _ = agreement(logits(P), logits(Q), 0.5)
    p, q = ([x * x / sum(y * y for y in law) for x in law] for law in (P, Q))
    assert chances.item() == pytest.approx(sum(map(min, p, q)))
    assert agreement(logits(P, P), logits(Q, P), 0.0)[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_one_vocabulary_lacks_is_never_accepted(temperature: float) -> None:
    wide = logits((0.25, 0.15, 0.1, 0.5))  # half of its mass where the draft has nothing
    chances, same = agreement(wide, logits(Q), temperature)
    assert chances.item() == pytest.approx(0.2 + 0.15 + 0.1 if temperature else 0.0)
    padded = torch.cat((logits(Q), torch.full((1, 1), 9.0)), 1)  # the draft's padding is never drafted
    assert agreement(logits(P), padded, temperature)[0].item() == pytest.approx(0.7 if temperature else 0.0)
    assert not same.item()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_agreement_is_what_rejection_sampling_accepts(rule: str) -> None:
    """One drafted token a pass, many passes; within 4 standard errors of the mean of sum(min(p, q))."""
    count = 4000
    target, draft = torch.randn(count, 7) * 2, torch.randn(count, 7) * 2
    p, q = target.softmax(-1), draft.softmax(-1)
    checker = verifier(rule)
    places = [Place(seed=i, position=5) for i in range(count)]
    drawn = checker.draw(q, places)
    drafts = [Draft([token], q[i : i + 1]) for i, token in enumerate(drawn)]
    rows = torch.stack((p, p), 1).flatten(0, 1)
    accepted = sum(len(kept) - 1 for kept in checker.verify(rows, drafts, places)) / count
    expected = agreement(target, draft, 1.0)[0].mean().item()
    assert abs(accepted - expected) < 4 * sqrt(expected * (1 - expected) / count)


def test_agreement_is_averaged_over_positions() -> None:
    one, three = agreement(logits(P), logits(Q), 1.0), agreement(logits(P, Q, P), logits(P, Q, Q), 1.0)
    read = averaged([one, three])
    values = torch.tensor([0.7, 1.0, 1.0, 0.7])
    assert read["text_positions"] == 4
    assert read["text_acceptance"] == pytest.approx(0.85)
    assert read["text_same_top"] == 0.5
    assert read["text_error"] == pytest.approx((values.std() / 2).item(), rel=1e-4)
    assert averaged([one])["text_error"] == 0.0


def report(**changes: Any) -> AcceptanceReport:
    """The pair of soup#843: c = 0.596, acceptance 0.813, verification as dear as a step."""
    count, cost = len(changes.get("acceptances", "12345")), changes.pop("draft_cost", 0.596)
    base = AcceptanceReport(
        temperature=1.0,
        batch_size=1,
        text_acceptance=0.8,
        text_error=0.01,
        text_same_top=0.7,
        text_positions=1000,
        acceptances=(0.813,) * 5,
        verified=(500, 400, 300, 200, 100),
        prompts=8,
        tokens=1000,
        step_seconds=0.025,
        draft_costs=tuple(cost * length for length in range(count + 1)),
        verify_costs=(1.0,) * 6,
        setting="patched target, patched draft",
    )
    return replace(base, **changes)


def test_speed_ups_of_a_published_pair() -> None:
    one = report()
    assert [one.speed_up(k) for k in (0, 1, 2, 3, 5)] == pytest.approx([1, 1.136, 1.129, 1.080, 0.956], abs=5e-4)
    assert one.break_even(5) == pytest.approx(0.832, abs=5e-4)
    assert one.num_draft == 1 and one.use
    assert "num_draft=1: 1.14x" in one.verdict


def test_expected_tokens_are_the_geometric_sum() -> None:
    one = report(acceptances=(0.7,) * 8, verify_costs=(1.0,) * 9, verified=(1,) * 8)
    expected = [1.7, 2.19, 2.533, 2.7731, 3.19882131]
    assert [one.expected_tokens(k) for k in (1, 2, 3, 4, 8)] == pytest.approx(expected)


def test_verification_that_grows_dear_shortens_the_draft() -> None:
    free = report(draft_cost=0.05)
    dear = report(draft_cost=0.05, verify_costs=(1.0, 1.0, 1.1, 3.0, 3.2, 3.4))
    assert (free.num_draft, dear.num_draft) == (5, 2)


def test_a_call_that_costs_more_than_its_tokens_makes_drafts_longer() -> None:
    """What is done around a draft is paid once, however long it is."""
    around = report(draft_costs=(0.0, 0.4, 0.45, 0.5, 0.55, 0.6))
    assert around.speed_up(1) == pytest.approx(1.813 / 1.4) and around.num_draft == 5
    assert around.draft_cost == pytest.approx(0.12) and report(draft_cost=0.4).num_draft == 2


def test_a_draft_that_does_not_pay_is_not_recommended() -> None:
    slow = report(acceptances=(0.3,) * 5)
    assert not slow.use
    assert slow.verdict.startswith("do not use it: at best 0.8")
    assert "30% is accepted, and it pays from 60%" in slow.verdict
    never = report(draft_cost=1.2)
    assert never.break_even(1) == inf
    assert "no acceptance pays" in never.verdict
    assert report(acceptances=(0.62,) * 5).verdict.startswith("it hardly matters")


def test_report_is_a_table_and_a_dict() -> None:
    one = report(draft_cost=1.2)
    lines = str(one).splitlines()
    assert len(lines) == 3 + 1 + 5 + 1 and max(map(len, lines[:-1])) < 110
    assert lines[-1] == one.verdict
    again = json.loads(json.dumps(one.to_dict()))
    assert again["acceptances"] == [0.813] * 5
    assert again["by_num_draft"][0]["break_even"] is None
    assert again["by_num_draft"][1]["expected_tokens"] == pytest.approx(one.expected_tokens(2))
    assert again["use"] is False


def test_acceptance_for_brings_as_many_tokens() -> None:
    assert acceptance_for(1 + 0.6 + 0.36 + 0.216, 3) == pytest.approx(0.6)
    level = acceptance_for(expected_tokens([0.9, 0.1]), 2)
    assert 1 + level + level**2 == pytest.approx(1 + 0.9 + 0.09)
    assert acceptance_for(3, 2) == pytest.approx(1.0) and acceptance_for(3.01, 2) == inf
    assert acceptance_for(1.0, 4) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("count", "tokens"), [(1, 1.7), (2, 2.19), (3, 2.533), (4, 2.7731), (8, 3.19882131)])
def test_expected_tokens(count: int, tokens: float) -> None:
    assert expected_tokens([0.7] * count) == pytest.approx(tokens, abs=1e-8)
    assert expected_tokens([0.7] * count) == pytest.approx((1 - 0.7 ** (count + 1)) / (1 - 0.7))
    assert expected_tokens([]) == 1.0
