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

from hf_accel.errors import UnsupportedError
from hf_accel.generation.sampling.params import SamplingParams
from hf_accel.generation.sampling.purity import is_stateful, refuse_stateful


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
    with pytest.raises(UnsupportedError, match=r"(Counting|Uncopyable|noisy) returns .* speculative=None"):
        refuse_stateful(SamplingParams(processors=(processor,)).sampling(), 32)


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
    refuse_stateful(SamplingParams(processors=(processor,)).sampling(), 32)


def test_asking_changes_nothing() -> None:
    processor, state = Counting(), torch.get_rng_state()
    before = copy.deepcopy(vars(processor))
    is_stateful(processor, 32)
    is_stateful(noisy, 32)
    assert vars(processor) == before
    assert torch.equal(torch.get_rng_state(), state)
