"""Stateful processors are found out by asking twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopPLogitsWarper,
)

from hf_accel.generation.sampling.purity import is_stateful, stateful_refusal


class Counting:
    """Pushes another token with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, self.calls % scores.shape[1]] += 10
        return scores


class Uncopyable(Counting):
    def __deepcopy__(self, memo: object) -> Uncopyable:
        raise TypeError("not copied")


def noisy(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores + torch.rand_like(scores)


def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
    raise RuntimeError("never answers")


@pytest.mark.parametrize("processor", [Counting(), Uncopyable(), noisy])
def test_stateful(processor: object) -> None:
    assert is_stateful(processor, 32)
    name = getattr(processor, "__name__", type(processor).__name__)
    assert stateful_refusal([broken, processor], 32) == (
        f"the logits processor {name} returns different scores for the same input when it is called again"
    )


@pytest.mark.parametrize(
    "processor",
    [
        lambda input_ids, scores: scores.fill_(-torch.inf),
        broken,
        NoRepeatNGramLogitsProcessor(2),
        RepetitionPenaltyLogitsProcessor(1.2),
        SequenceBiasLogitsProcessor({(1, 2): 1.0, (3,): -1.0}),  # prepares itself when first called
        NoBadWordsLogitsProcessor([[3]]),
        TopPLogitsWarper(0.9),
    ],
)
def test_pure(processor: object) -> None:
    assert not is_stateful(processor, 32)
    assert stateful_refusal([processor], 32) is None


def test_asking_changes_nothing() -> None:
    processor, state = Counting(), torch.get_rng_state()
    before = copy.deepcopy(vars(processor))
    is_stateful(processor, 32)
    is_stateful(noisy, 32)
    assert vars(processor) == before
    assert torch.equal(torch.get_rng_state(), state)
