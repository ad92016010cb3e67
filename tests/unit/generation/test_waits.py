"""The host waits for a device once a step, to read the tokens, which are those that a CPU chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.cache.group import Step
from hf_accel.generation.batcher import Batcher
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.controller import Controller
from hf_accel.generation.speculation.speculation import Speculation
from hf_accel.generation.speculation.verifiers import verifier
from hf_accel.generation.speculation.verifiers.inverse import inverse_draw
from hf_accel.generation.speculation.verifiers.noise import race_key
from hf_accel.generation.speculation.verifiers.seeded import race

from .asking import request_sampling
from .remote import Remote, install
from .toy import VOCABULARY, ToyDrafter, ToyRunner, toy_pages

SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalized": {"temperature": 0.0, "repetition_penalty": 1.5},
    "plain": {"temperature": 1.0},
    "top-k": {"temperature": 0.8, "top_k": 4},
    "top-p": {"temperature": 0.8, "top_p": 0.7},
    "both": {"temperature": 0.8, "top_k": 6, "top_p": 0.7},
    "min-p": {"temperature": 0.8, "min_p": 0.1},
}


class RemoteRunner(ToyRunner):
    def __call__(self, ids: list[int], positions: list[int], step: Step, keep: list[int]) -> Tensor:
        return super().__call__(ids, positions, step, keep).as_subclass(Remote)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    yield install(monkeypatch)


def sequences_of(settings: dict[str, Any], count: int = 5) -> list[Sequence]:
    sampling = request_sampling(vocabulary_size=VOCABULARY, num_prompt=3, **settings)
    return [Sequence([1, 2, 3 + i], 12, sampling, seed=i) for i in range(count)]


def run(runner: type[ToyRunner], settings: dict[str, Any], verify: str, *, drafts: bool) -> tuple[Any, int]:
    pages = toy_pages(100, block_size=4, window=None)
    rule = verifier(verify)
    drafters = [ToyDrafter(0, rule, None, drawn=False)] if drafts else []
    batcher = Batcher(runner(pages), pages, Speculation(rule, drafters, Controller(3)))
    sequences = sequences_of(settings)
    for sequence in sequences:
        batcher.add(sequence)
    while batcher.has_work:
        batcher.step()
    return [sequence.tokens for sequence in sequences], batcher.num_passes


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("verify", ["token", "block", "seeded"])
@pytest.mark.parametrize("name", SAMPLED)
def test_one_wait_a_step(name: str, verify: str, drafts: bool, waits: Counter[str]) -> None:
    expected, passes = run(ToyRunner, SAMPLED[name], verify, drafts=drafts)
    waits.clear()
    found, again = run(RemoteRunner, SAMPLED[name], verify, drafts=drafts)
    assert found == expected and again == passes
    assert waits.total() == passes, waits


def test_counting(waits: Counter[str]) -> None:
    """The count is one of everything for which a host waits."""
    x = torch.rand(4).as_subclass(Remote)
    y = (x + 1).softmax(-1)
    assert type(y) is Remote and not waits
    for read in (
        lambda: y.tolist(), lambda: y[0].item(), lambda: bool((y > 0).all()), lambda: y.cpu(),
        lambda: y[y > 0.5], lambda: y.nonzero(), lambda: int(y.argmax()), lambda: y.to("cpu"),
    ):  # fmt: skip
        waits.clear()
        read()
        assert waits.total() == 1, waits


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_drawing_on_a_device(size: int, waits: Counter[str]) -> None:
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(50, size, generator=generator) * (torch.rand(50, size, generator=generator) < 0.3)
    weights[:, size // 2] += 0.1
    uniforms = [0.0, 1 - 2.0**-53, *torch.rand(48, generator=generator, dtype=torch.float64).tolist()]
    expected = inverse_draw(weights, uniforms)
    assert not waits
    assert inverse_draw(weights.as_subclass(Remote), uniforms) == expected
    assert waits == {"tolist": 1}


def test_an_index_without_weight_is_drawn_again(monkeypatch: pytest.MonkeyPatch, waits: Counter[str]) -> None:
    from hf_accel.generation.speculation.verifiers import inverse

    weights = torch.rand(3, 200)
    weights[1, 7] = 0
    right = inverse_draw(weights, [0.1, 0.5, 0.9])
    found = inverse._checked(weights, [[right[0], 1], [7, 0], [right[2], 1]], [0.1, 0.5, 0.9])
    assert found == right


def test_racing_on_a_device(waits: Counter[str]) -> None:
    probabilities = torch.rand(40, 300).pow(8).softmax(-1) * (torch.rand(40, 300) < 0.5)
    keys = [race_key(seed, 5) for seed in range(40)]
    expected = race(probabilities, keys)
    assert race(probabilities.as_subclass(Remote), keys) == expected
    assert waits == {"tolist": 1}


def test_impossible_rows(waits: Counter[str]) -> None:
    """An error of one row is found without another wait, and ends this sequence alone."""
    sampling = Sampling([Spoiled()], greedy=True)  # type: ignore[list-item]
    pages = toy_pages(100, block_size=4, window=None)
    batcher = Batcher(RemoteRunner(pages), pages, Speculation())
    sequences = [Sequence([1, 2, 3 + i], 4, sampling) for i in range(3)]
    for sequence in sequences:
        batcher.add(sequence)
    progress = batcher.step()
    assert [each.error is None for each in progress] == [True, False, True]
    assert "its processed scores hold NaN" in str(progress[1].error)
    assert waits == {"tolist": 1}


class Spoiled:
    uses_prefix = False

    def __call__(self, scores: Tensor, prefixes: Any) -> Tensor:
        scores = scores.clone()
        scores[1] = float("nan")
        return scores
