"""The host waits for a device once a step, to read the tokens, which are those that a CPU chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.cache.pages import Pages
from hf_accel.cache.step import Step
from hf_accel.generation.batcher import Batcher
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import Draft, Sequence
from hf_accel.generation.speculation.controller import Controller
from hf_accel.generation.speculation.drafters.model import ModelDrafter
from hf_accel.generation.speculation.speculation import Speculation
from hf_accel.generation.speculation.verifiers import Verifier, inverse, verifier
from hf_accel.generation.speculation.verifiers.noise import race_key
from hf_accel.generation.speculation.verifiers.seeded import race
from hf_accel.tensors import Unread

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
    "frequency": {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.1},
    "no early end": {"temperature": 0.8, "min_new_tokens": 4, "stop_token_ids": [3, 5]},
    "few tokens": {"temperature": 0.8, "allowed_token_ids": [1, 2, 3, 7]},
}


class RemoteRunner(ToyRunner):
    def __call__(self, ids: list[int] | Tensor, positions: list[int], step: Step, keep: list[int]) -> Tensor:
        own = ids.as_subclass(Tensor).tolist() if isinstance(ids, Tensor) else ids  # the device reads its own
        return super().__call__(own, positions, step, keep).as_subclass(Remote)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    yield install(monkeypatch)


class RemoteDrafter(ToyDrafter):
    """Its drafts come from a device."""

    def propose(self, sequences: Any, lengths: Any) -> list[Draft]:
        drafts = super().propose(sequences, lengths)
        return [
            draft if draft.probabilities is None else Draft(draft.tokens, draft.probabilities.as_subclass(Remote))
            for draft in drafts
        ]


class Counted(ModelDrafter):
    """A draft model that counts the times when it drafts anything."""

    num_proposals = 0

    def propose(self, sequences: Any, lengths: Any) -> list[Draft]:
        self.num_proposals += any(lengths)
        return super().propose(sequences, lengths)


def sequences_of(*settings: dict[str, Any], count: int = 5) -> list[Sequence]:
    samplings = [request_sampling(vocabulary_size=VOCABULARY, num_prompt=3, **each) for each in settings]
    asked = [RequestSettings(12, sampling) for sampling in samplings]
    return [Sequence([1, 2, 3 + i], asked[i % len(asked)], seed=i) for i in range(count)]


def draft_model(runner: type[ToyRunner], rule: Verifier, target_pages: Pages) -> Counted:
    """A draft model that reads only the last three tokens, and whose vocabulary is smaller by two."""
    pages = toy_pages(100, block_size=4, window=3)
    sizes = {"num_tokens": VOCABULARY - 2, "target_tokens": VOCABULARY}
    return Counted(runner(pages), pages, rule, target_pages=target_pages, **sizes)


def run(runner: type[ToyRunner], *settings: dict[str, Any], verify: str, drafts: str = "none") -> tuple[Any, int]:
    """Returns all tokens, and how often the host must read: in each pass of the model, and once in each draft."""
    pages = toy_pages(100, block_size=4, window=None)
    rule = verifier(verify)
    toy = RemoteDrafter if runner is RemoteRunner else ToyDrafter
    drafters: dict[str, Any] = {
        "none": lambda: [],
        "not drawn": lambda: [toy(0, rule, None, drawn=False)],
        "drawn": lambda: [toy(0, rule, None, drawn=True)],
        "model": lambda: [draft_model(runner, rule, pages)],
    }
    own = drafters[drafts]()
    batcher = Batcher(runner(pages), pages, Speculation(rule, own, Controller(3)))
    sequences = sequences_of(*settings)
    for sequence in sequences:
        batcher.add(sequence)
    while batcher.has_work:
        batcher.step()
    proposals = own[0].num_proposals if drafts == "model" else 0
    assert drafts != "model" or proposals > 3
    return [sequence.tokens for sequence in sequences], batcher.num_passes + proposals


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafts", ["none", "not drawn", "drawn", "model"])
@pytest.mark.parametrize("verify", ["token", "block", "seeded"])
@pytest.mark.parametrize("name", SAMPLED)
def test_one_wait_a_step(name: str, verify: str, drafts: str, waits: Counter[str]) -> None:
    expected, reads = run(ToyRunner, SAMPLED[name], verify=verify, drafts=drafts)
    waits.clear()
    found, again = run(RemoteRunner, SAMPLED[name], verify=verify, drafts=drafts)
    assert found == expected and again == reads
    if drafts == "model" and uses_prefixes(SAMPLED[name]):
        assert waits.total() > reads  # the processors of a drafted token see those before it
    else:
        assert waits.total() == reads, waits


def uses_prefixes(settings: dict[str, Any]) -> bool:
    return sequences_of(settings)[0].settings.sampling.uses_prefix


@pytest.mark.parametrize("drafts", ["none", "drawn", "model"])
@pytest.mark.parametrize("verify", ["token", "block", "seeded"])
def test_one_wait_for_all_settings(verify: str, drafts: str, waits: Counter[str]) -> None:
    """Sequences with settings of their own are chosen for one after the other, and read together."""
    mixed = [SAMPLED[name] for name in ("greedy", "plain", "top-k", "min-p", "both")]
    expected, reads = run(ToyRunner, *mixed, verify=verify, drafts=drafts)
    waits.clear()
    found, again = run(RemoteRunner, *mixed, verify=verify, drafts=drafts)
    assert found == expected and again == reads
    assert waits.total() == reads, waits


def test_a_draft_from_a_token_that_must_be_drawn_again(waits: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The device went on from an index of weight 0: the draft is made again, with a wait for each token."""
    expected, reads = run(ToyRunner, SAMPLED["top-k"], verify="token", drafts="model")
    real, calls = inverse._drawn_on_device, []

    def sometimes_impossible(weights: Tensor, blocks: Tensor, uniforms: Tensor) -> Unread[list[int]]:
        unread = real(weights, blocks, uniforms)
        calls.append(weights)
        if len(calls) % 7 == 0:
            unread.numbers[0], unread.numbers[len(weights)] = weights[0].argmin(), 0
        return unread

    monkeypatch.setattr(inverse, "_drawn_on_device", sometimes_impossible)
    tried: list[bool] = []
    drafted = ModelDrafter._drafted

    def watched(self: Any, *args: Any, ahead: bool) -> Any:
        tried.append(ahead)
        return drafted(self, *args, ahead=ahead)

    monkeypatch.setattr(ModelDrafter, "_drafted", watched)
    waits.clear()
    found, again = run(RemoteRunner, SAMPLED["top-k"], verify="token", drafts="model")
    assert found == expected and again == reads
    assert 0 < tried.count(False) < tried.count(True)
    assert waits.total() > reads


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
    numbers = torch.tensor(uniforms, dtype=torch.float64)
    expected = inverse.inverse_draw(weights, numbers).read()
    assert not waits
    found = inverse.inverse_draw(weights.as_subclass(Remote), numbers.as_subclass(Remote))
    assert not waits
    assert found.read() == expected
    assert waits == {"tolist": 1}


def test_an_index_without_weight_is_drawn_again(waits: Counter[str]) -> None:
    weights = torch.rand(3, 200)
    weights[1, 7] = 0
    uniforms = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    right = inverse.inverse_draw(weights, uniforms).read()
    found = inverse._checked(weights, [right[0], 7, right[2], 1, 0, 1], uniforms)
    assert found == right


def test_racing_on_a_device(waits: Counter[str]) -> None:
    probabilities = torch.rand(40, 300).pow(8).softmax(-1) * (torch.rand(40, 300) < 0.5)
    keys = [race_key(seed, 5) for seed in range(40)]
    expected = race(probabilities, keys).read()
    assert race(probabilities.as_subclass(Remote), keys).read() == expected
    assert waits == {"tolist": 1}


def test_impossible_rows(waits: Counter[str]) -> None:
    """An error of one row is found without another wait, and ends this sequence alone."""
    sampling = Sampling([Spoiled()], greedy=True)  # type: ignore[list-item]
    pages = toy_pages(100, block_size=4, window=None)
    batcher = Batcher(RemoteRunner(pages), pages)
    sequences = [Sequence([1, 2, 3 + i], RequestSettings(4, sampling)) for i in range(3)]
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
