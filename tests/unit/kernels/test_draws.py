"""Draws of tokens by the native kernel, against those that torch makes of the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_accel.generation.sampling.filters import top_k_top_p
from hf_accel.generation.speculation.verifiers import noise
from hf_accel.kernels.cpu.draws import INVERSE, RACE, Draws, drawn, drawn_from

pytestmark = pytest.mark.usefixtures("isa")
ROWS, RIVALS = 24, 16  # RIVALS: MOST_RIVALS of logits.cpp
KEYS = [noise.race_key(seed, 7) for seed in range(ROWS)]


def logits(size: int, dtype: torch.dtype) -> Tensor:
    made = torch.randn(ROWS, size, generator=torch.Generator().manual_seed(size)) * 3
    made[1::3, ::2] = -torch.inf
    return made.to(dtype)


def times(weights: Tensor) -> Tensor:
    return noise.exponentials(torch.tensor(KEYS)[:, None], torch.arange(weights.shape[1])) / weights


@pytest.mark.parametrize("size", [2, 17, 100, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_races_have_the_winners_of_torch(size: int, dtype: torch.dtype) -> None:
    given = logits(size, dtype)
    weights, k = given.float().div(0.7).softmax(-1), min(3, size)
    expected = times(weights).topk(k, largest=False)
    draws = Draws(RACE, temperature=0.7)
    numbers = draws.numbers(KEYS)
    assert numbers is not None
    tokens, confidences, _ = drawn(given, draws, numbers, k)
    possible = expected.values < torch.inf
    assert torch.equal(tokens, torch.where(possible, expected.indices, -1))
    assert torch.equal(drawn_from(weights, draws, numbers), expected.indices[:, 0])
    rivals = 1 / times(weights).topk(min(RIVALS, size), largest=False).values
    shares = (1 / expected.values) / rivals.sum(-1, keepdim=True)
    assert torch.allclose(confidences.double().exp(), shares, atol=1e-4)


@pytest.mark.parametrize("size", [2, 17, 100, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_of_the_probabilities_that_are_written(size: int, dtype: torch.dtype) -> None:
    given, uniforms = logits(size, dtype), torch.linspace(0, 0.9999, ROWS, dtype=torch.float64)
    tokens, _, probabilities = drawn(given, Draws(INVERSE, temperature=1.3), uniforms)
    assert torch.allclose(probabilities, given.float().div(1.3).softmax(-1), atol=1e-6)
    sums = probabilities.double().cumsum(-1)
    own = sums.gather(1, tokens)[:, 0]
    before = own - probabilities.double().gather(1, tokens)[:, 0]
    assert (before <= uniforms + 1e-6).all() and (uniforms <= own + 1e-6).all()
    assert (probabilities.gather(1, tokens) > 0).all()


def test_top_k_and_top_p_keep_what_torch_keeps() -> None:
    given, uniforms = logits(1000, torch.float32)[::3], torch.full((ROWS // 3,), 0.5, dtype=torch.float64)
    for k, p in ((5, 1.0), (50, 0.8), (0, 0.6)):
        _, _, probabilities = drawn(given, Draws(INVERSE, top_k=k, top_p=p), uniforms)
        assert torch.allclose(probabilities, top_k_top_p(given, k or 1000, p).softmax(-1), atol=1e-6)


def test_likeliest_tokens_have_their_probabilities() -> None:
    given = logits(333, torch.float32)
    tokens, confidences, _ = drawn(given, Draws(), None, 4)
    expected = given.softmax(-1).topk(4)
    assert torch.equal(tokens, expected.indices)
    assert torch.allclose(confidences.exp(), expected.values, atol=1e-6)


def test_many_draws_have_the_distribution() -> None:
    """Each token comes as often as it should, within five standard errors."""
    count, law = 20_000, torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    weights = law.expand(count, -1)
    keys = torch.tensor([noise.race_key(3, position) for position in range(count)])
    uniforms = torch.tensor([noise.uniform(3, position, 0) for position in range(count)], dtype=torch.float64)
    for draws, numbers in ((Draws(RACE), keys), (Draws(INVERSE), uniforms)):
        shares = torch.bincount(drawn_from(weights, draws, numbers), minlength=5) / count
        assert ((shares - law).abs() <= 5 * (law * (1 - law) / count).sqrt()).all()
