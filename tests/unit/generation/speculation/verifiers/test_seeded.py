"""Verification with shared random numbers: one output for a seed, whatever is drafted."""

from __future__ import annotations

import math

import pytest
import torch

from hf_accel.generation.sequence import Draft
from hf_accel.generation.speculation.verifiers import Place, SeededVerifier, TokenVerifier
from hf_accel.generation.speculation.verifiers.noise import gumbel
from tests.unit.generation.chi_square import chi_square, critical

P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
COUNT = 20_000


def draws(law: list[float], count: int = COUNT) -> list[int]:
    laws = torch.tensor([law]).expand(count, -1)
    return SeededVerifier().draw(laws, [Place(n % 50, n // 50) for n in range(count)])


@pytest.mark.parametrize("law", [P, [0.0, 0.9, 0.0, 0.1], [1 / 64] * 64])
def test_race_has_the_law(law: list[float]) -> None:
    drawn = draws(law)
    counts = [drawn.count(token) for token in range(len(law))]
    possible = [token for token, p in enumerate(law) if p]
    assert all(counts[token] == 0 for token in range(len(law)) if token not in possible)
    statistic = chi_square([counts[token] for token in possible], [law[token] * COUNT for token in possible])
    assert statistic < critical(len(possible) - 1)


def test_two_laws_agree_as_often_as_theory_says() -> None:
    """P(match) = sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) (Daliri, Musco, Suresh 2024)."""
    expected = sum(1 / sum(max(P[y] / P[x], Q[y] / Q[x]) for y in range(3)) for x in range(3))
    assert expected == pytest.approx(0.6935484, abs=1e-7)
    same = sum(a == b for a, b in zip(draws(P), draws(Q), strict=True)) / COUNT
    assert abs(same - expected) < 4 * math.sqrt(expected * (1 - expected) / COUNT)


def model(tokens: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(7**j * token for j, token in enumerate(tokens[-2:])))
    return torch.randn(6, generator=generator).softmax(0)


def drafter(kind: str, tokens: list[int], length: int) -> Draft:
    if kind == "none":
        return Draft()
    if kind == "adversarial":
        return Draft([5 - int(model([*tokens, *[0] * j]).argmax()) for j in range(length)])
    drafted: list[int] = []
    laws = []
    for j in range(length):
        noise = torch.rand(6, generator=torch.Generator().manual_seed(j))
        laws.append(
            (model([*tokens, *drafted]) + 0.2 * noise).softmax(0) if kind == "rough" else model(tokens + drafted)
        )
        drafted += SeededVerifier().draw(laws[-1][None], [Place(3, len(tokens)).next(j)])
    return Draft(drafted, torch.stack(laws))


@pytest.mark.parametrize("length", [1, 4])
def test_output_depends_on_the_seed_alone(length: int) -> None:
    outputs, passes = {}, {}
    for kind in ("none", "adversarial", "rough", "oracle"):
        tokens, passes[kind] = [0], 0
        while len(tokens) < 41:
            draft = drafter(kind, tokens, length)
            laws = torch.stack([model(tokens + draft.tokens[:j]) for j in range(len(draft) + 1)])
            tokens += SeededVerifier().verify(laws, [draft], [Place(3, len(tokens))])[0]
            passes[kind] += 1
        outputs[kind] = tokens[:41]
    assert all(tokens == outputs["none"] for tokens in outputs.values())
    assert passes["oracle"] == math.ceil(40 / (length + 1)) < passes["rough"] < passes["none"] == 40


def test_rows_of_any_support_are_raced_alike() -> None:
    """The winner among few possible tokens is that of a race over all of them, and rows keep their order."""
    laws = torch.rand(6, 5000, generator=torch.Generator().manual_seed(0))
    laws[1, 40:], laws[3, :4990], laws[4, 100:4500] = 0, 0, 0
    places = [Place(seed, 9) for seed in range(6)]
    noise = torch.stack([gumbel(seed, 9, 5000) for seed in range(6)])
    assert SeededVerifier().draw(laws, places) == (laws.double().log() + noise).argmax(-1).tolist()


def test_equal_times_go_to_the_lowest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "hf_accel.generation.speculation.verifiers.noise.exponentials"
    monkeypatch.setattr(name, lambda keys, ids: torch.ones(len(ids)).double())
    monkeypatch.setattr("hf_accel.kernels.cpu.refusal", lambda: "no compiler")
    assert SeededVerifier().draw(torch.tensor([[0.0, 0.4, 0.2, 0.4]]), [Place(0, 0)]) == [1]


def test_candidates_are_first_in_the_race_of_the_drafted_token() -> None:
    """They hold the target's own token more often than its likeliest tokens do, the first one first."""
    laws, places = torch.tensor([Q]).expand(2000, -1), [Place(n % 50, n // 50) for n in range(2000)]
    found = SeededVerifier().candidates(laws, places, 2)
    assert [two[0] for two in found] == SeededVerifier().draw(laws, places)
    own = SeededVerifier().draw(torch.tensor([P]).expand(2000, -1), places)
    shared = sum(token in two for token, two in zip(own, found, strict=True))
    likeliest = TokenVerifier().candidates(laws, places, 2)
    assert set(map(tuple, likeliest)) == {(1, 2)}
    assert shared / 2000 > 0.8 > sum(token in (1, 2) for token in own) / 2000
    assert SeededVerifier().candidates(torch.tensor([[0.0, 1.0, 0.0]]), places[:1], 9) == [[1]]
    assert SeededVerifier().candidates(laws[:0], [], 2) == []
