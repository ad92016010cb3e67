"""What a pass emits has exactly the model's law, by enumeration of all drafts and all random numbers."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_accel.generation.sequence import Draft
from hf_accel.generation.speculation.verifiers import BlockVerifier, Place, TokenVerifier, Verifier
from hf_accel.generation.speculation.verifiers.block import acceptances
from hf_accel.generation.speculation.verifiers.noise import Purpose
from hf_accel.generation.speculation.verifiers.rejection import Drawn, DrawnDrafts

from .enumeration import ONE, Case, Kind, Tokens, error, law_of_pass, mean_length, run

EXACT = 1e-12
P = [0.5, 0.3, 0.2]
Q = [0.2, 0.5, 0.3]
KINDS = [TokenVerifier, BlockVerifier]


def always(law: list[float]):
    return lambda tokens: law


def random_law(seed: int, size: int):
    """Another law after each prefix."""

    @functools.cache
    def law(tokens: Tokens) -> list[float]:
        number = functools.reduce(lambda a, token: a * (size + 1) + token + 1, tokens, seed)
        generator = torch.Generator().manual_seed(number)
        return torch.randn(size, generator=generator, dtype=torch.float64).mul(1.5).softmax(0).tolist()

    return law


@pytest.mark.parametrize(("length", "expected"), [(1, 1.7), (2, 2.19), (3, 2.533)])
def test_tokens_per_pass_by_token(length: int, expected: float) -> None:
    law = law_of_pass(TokenVerifier, always(P), always(Q), length)
    assert mean_length(law) == pytest.approx(expected, abs=EXACT)  # (1 - .7^(length + 1)) / (1 - .7)
    assert error(law, always(P), length + 1) < EXACT


@pytest.mark.parametrize(("kind", "accepted"), [(TokenVerifier, 10 / 9), (BlockVerifier, 11 / 9)])
def test_example_of_the_paper_on_blocks(kind: Kind, accepted: float) -> None:
    p, q = always([1 / 3, 2 / 3]), always([2 / 3, 1 / 3])
    law = law_of_pass(kind, p, q, 2)
    assert mean_length(law) - 1 == pytest.approx(accepted, abs=EXACT)
    assert error(law, p, 3) < EXACT


def test_laws_that_depend_on_what_stands_before() -> None:
    p, q = random_law(1, 4), random_law(2, 4)
    by_token, by_block = (law_of_pass(kind, p, q, 3) for kind in KINDS)
    assert error(by_token, p, 4) < EXACT
    assert error(by_block, p, 4) < EXACT
    assert mean_length(by_block) > mean_length(by_token) + 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("p", "q"),
    [
        pytest.param([0.0, 1.0, 0.0], [0.3, 0.3, 0.4], id="model is certain"),
        pytest.param([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], id="nothing in common"),
        pytest.param([0.2, 0.3, 0.5], [0.2, 0.3, 0.5], id="equal"),
        pytest.param([0.2, 0.3, 0.5], [1.0, 0.0, 0.0], id="draft is certain"),
        pytest.param([0.0, 0.4, 0.6], [0.1, 0.9, 0.0], id="zeros in both"),
    ],
)
def test_extreme_laws(kind: Kind, p: list[float], q: list[float]) -> None:
    law = law_of_pass(kind, always(p), always(q), 2)
    assert error(law, always(p), 3) < EXACT
    if p == q:
        assert mean_length(law) == pytest.approx(3, abs=EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", [(), (0,), (2, 1)])
def test_drafts_that_were_not_drawn(kind: Kind, draft: Tokens) -> None:
    """Tokens are those that no draft at all gives for the same numbers: the draft stays while it equals them."""
    p = torch.tensor([P] * (len(draft) + 1), dtype=torch.float64)
    grid = [(n + 0.5) / 20 for n in range(20)]
    cases = [Case(p, Draft(list(draft)), (), numbers) for numbers in itertools.product(grid, repeat=len(draft) + 1)]
    for case, kept in zip(cases, run(kind, cases), strict=True):
        plain = [token_of(u) for u in case.target]
        same = next((j for j, token in enumerate(draft) if token != plain[j]), len(draft))
        assert kept == plain[: same + 1]


def token_of(u: float) -> int:
    return 0 if u < 0.5 else 1 if u < 0.8 else 2


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_a_pass_do_not_touch_each_other(kind: type[Verifier]) -> None:
    generator = torch.Generator().manual_seed(5)
    laws = torch.randn(8, 5, generator=generator).softmax(-1)
    q = torch.randn(3, 5, generator=generator).softmax(-1)
    drafts = [Draft([1, 2], q[:2]), Draft([]), Draft([4]), Draft([0], q[2:])]
    for seed in range(20):
        places = [Place(seed + at, 10 * at) for at in range(4)]
        alone = [
            kind().verify(laws[start : start + len(draft) + 1], [draft], [place])[0]
            for start, draft, place in zip([0, 3, 4, 6], drafts, places, strict=True)
        ]
        assert kind().verify(laws, drafts, places) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_draws_from_its_law(kind: type[Verifier]) -> None:
    edges = {0.0: 1, 0.2: 1, 0.4 - 1e-9: 1, 0.4: 2, ONE: 2}
    drafter = kind(lambda seed, position, purpose, offset: list(edges)[seed])
    laws = torch.tensor([[0.0, 0.4, 0.6, 0.0]] * len(edges), dtype=torch.float64)
    assert drafter.draw(laws, [Place(seed, 0) for seed in range(len(edges))]) == list(edges.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("u", [0.0, ONE])
def test_impossible_tokens_never_come(kind: Kind, u: float) -> None:
    assert not impossible_tokens(kind, u)


def impossible_tokens(kind: Kind, u: float) -> list[int]:
    """The tokens of probability 0 that come when all random numbers are u, over drafts that propose each token."""
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]] * 3, dtype=torch.float32)
    q = torch.full((2, 5), 0.2)
    barely_less = p[:2] * (1 + 2.0**-20)  # nothing is left of (p - q)+
    cases = [
        Case(p, Draft([a, b], law), (u, u), (u, u, u))
        for law in (q, None, barely_less)
        for a in range(5)
        for b in range(5)
        if law is not barely_less or {a, b} <= {1, 3}
    ]
    return [token for kept in run(kind, cases) for token in kept if p[0, token] == 0]


def test_a_block_is_judged_by_its_residual_mass() -> None:
    """h_1 = S / (S + 1 - f), f = (1/3) / (2/3) and S = sum((f p - q)+) = 0 for the first example's unlikely token."""
    p, q = torch.tensor([[1 / 3, 2 / 3]] * 3), torch.tensor([[2 / 3, 1 / 3]] * 2)
    unlikely = Drawn(p, q, [1 / 3, 1 / 3], [2 / 3, 2 / 3], [0.0, 0.0])
    assert acceptances(unlikely, [1, 0.5, 0.25]) == [0, 0.25]
    likely = Drawn(p, q, [2 / 3, 1 / 3], [1 / 3, 2 / 3], [0.0, 0.0])
    assert acceptances(likely, [1, 1, 0.5]) == [1, 0.5]


def test_judged_on_a_device_as_on_the_host() -> None:
    """Both rules over random drafts of different lengths, to the bit."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(30):
        lengths = [int(n) for n in torch.randint(1, 6, (4,), generator=generator)]
        laws = [torch.randn(sum(lengths), 6, generator=generator).mul(2).softmax(-1) for _ in range(2)]
        p, q = (law * (torch.rand(law.shape, generator=generator) < 0.8) for law in laws)
        tokens, every = torch.randint(0, 6, (sum(lengths),), generator=generator), torch.arange(sum(lengths))
        uniforms = torch.rand(sum(lengths), generator=generator, dtype=torch.float64)
        split = [
            torch.split(values, lengths) for values in (p[every, tokens].double(), q[every, tokens].double(), uniforms)
        ]
        padded = [
            pad_sequence(list(values), batch_first=True, padding_value=beyond)
            for values, beyond in zip(split, (0.0, 1.0, 0.0), strict=True)
        ]
        starts = [0, *itertools.accumulate(lengths)][:-1]
        drafts = DrawnDrafts(lengths, starts, p, q, *padded)
        drawn = [
            Drawn(*laws, *(values.tolist() for values in numbers))
            for *laws, numbers in zip(p.split(lengths), q.split(lengths), zip(*split, strict=True), strict=True)
        ]
        for kind in KINDS:
            counts, factors = kind().accept_on_device(drafts)
            assert list(zip(counts.tolist(), factors.tolist(), strict=True)) == kind().accept(drawn)


def test_purposes_and_offsets_are_told_to_the_source_of_numbers() -> None:
    asked = []

    def number(seed: int, position: int, purpose: int, offset: int) -> float:
        asked.append((seed, position, Purpose(purpose).name, offset))
        return 0.0

    q = torch.tensor([Q, Q])
    BlockVerifier(number).verify(torch.tensor([P, P, P]), [Draft([0, 1], q)], [Place(7, 40)])
    assert asked == [(7, 40, "ACCEPT", 0), (7, 41, "ACCEPT", 1), (7, 42, "TARGET", 0)]
