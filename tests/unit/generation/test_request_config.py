"""The settings of a request against transformers' processors, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_accel.errors import UnsupportedError
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sampling.token_prefix import Prefix

from .asking import request_sampling

V = 400
PROMPT = 3
PREFIXES = [Prefix([7, 7, 399, 1, 7], PROMPT), Prefix([0, 5, 9], PROMPT, [398, 398]), Prefix([1, 2, 3, 4, 7], PROMPT)]
IDS = torch.tensor([prefix.tokens for prefix in PREFIXES])


def logits(dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(3, V, generator=torch.Generator().manual_seed(0)) * 3
    values[0, :20] = 2.5
    values[1, 50:80] = -torch.inf
    return values.to(dtype)


def double(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores * (1 + 0.1 * (input_ids[0, -1] % 3))


PARTS = {
    "logit_bias": ({3: 1.5, 7: -2.0}, lambda: SequenceBiasLogitsProcessor({(3,): 1.5, (7,): -2.0})),
    "repetition_penalty": (1.3, lambda: RepetitionPenaltyLogitsProcessor(1.3)),
    "bad_token_ids": ((11, 12), lambda: NoBadWordsLogitsProcessor([[11], [12]])),
    "min_new_tokens": (3, lambda: MinNewTokensLengthLogitsProcessor(PROMPT, 3, [2, 7])),
    "processors": ((double,), lambda: lambda ids, scores: torch.cat(
        [double(ids[row : row + 1], scores[row : row + 1]) for row in range(len(ids))]
    )),
    "temperature": (0.7, lambda: TemperatureLogitsWarper(0.7)),
    "top_k": (30, lambda: TopKLogitsWarper(30)),
    "top_p": (0.8, lambda: TopPLogitsWarper(0.8)),
    "min_p": (0.05, lambda: MinPLogitsWarper(0.05)),
}  # fmt: skip
SUBSETS = [{name} for name in PARTS] + [set(pair) for pair in itertools.combinations(PARTS, 2)] + [set(PARTS)]


@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(sorted(names)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_transformers(names: set[str], dtype: torch.dtype) -> None:
    keywords = {name: value for name, (value, _) in PARTS.items() if name in names}
    params = request_sampling(**{"temperature": 1.0, "stop_token_ids": (2, 7)} | keywords)
    given = logits(dtype)
    before = given.clone()
    expected = LogitsProcessorList([make() for name, (_, make) in PARTS.items() if name in names])
    got = params.process(given, PREFIXES if params.uses_prefix else None)
    torch.testing.assert_close(got, expected(IDS, given.float()), rtol=0, atol=0)
    assert got.dtype == torch.float32
    assert torch.equal(given, before)


def test_rows_of_other_lengths_do_not_matter() -> None:
    params = request_sampling(
        temperature=0.9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, min_new_tokens=2,
        stop_token_ids=(2,), processors=(double,), top_p=0.9,
    )  # fmt: skip
    prefixes = [Prefix([4], 1), Prefix([1, 2, 3, 4, 4, 4], 2), Prefix([9, 9], 1, [3, 3, 3])]
    together = params.process(logits(), prefixes)
    for row, prefix in enumerate(prefixes):
        assert torch.equal(together[row], params.process(logits()[row : row + 1], [prefix])[0])


def test_presence_and_frequency_count_the_output_only() -> None:
    params = request_sampling(presence_penalty=0.5, frequency_penalty=0.25)
    prefix = Prefix([3, 3, 8, 4, 4, 4], 3, [9])
    got = params.process(torch.zeros(1, 12), [prefix])
    expected = torch.zeros(1, 12)
    expected[0, 4], expected[0, 9] = -0.5 - 3 * 0.25, -0.5 - 0.25
    assert torch.equal(got, expected)


def test_ids_beyond_the_logits_are_only_in_the_embedding() -> None:
    params = request_sampling(repetition_penalty=2.0, frequency_penalty=1.0, min_new_tokens=9, stop_token_ids=(99,))
    got = params.process(torch.ones(1, 4), [Prefix([99], 1, [1, 98])])
    assert got.tolist() == [[1.0, -0.5, 1.0, 1.0]]


def test_allowed_tokens_are_the_only_ones() -> None:
    got = request_sampling(temperature=1.0, allowed_token_ids=(5, 2)).process(logits(), None)
    assert (got > -torch.inf).nonzero()[:, 1].tolist() == [2, 5] * 3
    assert torch.equal(got[:, [2, 5]], logits()[:, [2, 5]])


def test_processors_see_each_prefix_and_may_write_to_what_they_get() -> None:
    seen = []

    def greedy_writer(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids.tolist())
        input_ids.zero_()
        return scores.fill_(1.0)

    given = logits()
    request_sampling(processors=(greedy_writer, greedy_writer)).process(given, PREFIXES)
    assert sorted(map(str, seen)) == sorted(str([prefix.tokens]) for prefix in PREFIXES * 2)
    assert torch.equal(given, logits())


def test_what_is_plain_and_what_looks_back() -> None:
    def made(**keywords: Any) -> Sampling:
        return request_sampling(**keywords)

    assert made().plain and made(top_k=5).plain and not made().uses_prefix
    assert not made(temperature=1.0).plain
    assert not made(logit_bias={1: 1.0}).plain
    assert made(repetition_penalty=1.1).uses_prefix
    assert not made(min_new_tokens=3).uses_prefix, "no stop ids to suppress"


def test_keys() -> None:
    one = request_sampling(temperature=1.0, logit_bias={2: 1, 1: 2}, processors=[double], logprobs=3)
    two = request_sampling(temperature=1.0, logit_bias={1: 2.0, 2: 1.0}, processors=(double,))
    assert one.key == two.key and hash(one.key) == hash(two.key)
    assert one.key != request_sampling(temperature=1.0, logit_bias={1: 2.0, 2: 1.0}).key


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": None}, "temperature=None"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_p": 1.1}, "top_p=1.1 must be a finite number from 0 to 1; None keeps every token"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"presence_penalty": "high"}, "presence_penalty='high' must be a finite number; 0 is none"),
        ({"min_new_tokens": -2}, "min_new_tokens=-2"),
        ({"logprobs": True}, "logprobs=True"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias=-1"),
        ({"logit_bias": {1: float("nan")}}, "token 1 is nan"),
        ({"logit_bias": {1: "much"}}, "token 1 is much"),
        ({"allowed_token_ids": ()}, "allowed_token_ids=()"),
        ({"bad_token_ids": ["a"]}, "bad_token_ids='a'"),
        ({"processors": [3]}, "processors holds 3"),
    ],
)
def test_refusals(keywords: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        request_sampling(**keywords)
    assert words in str(caught.value)


@pytest.mark.parametrize("keywords", [{"logit_bias": {400: 1.0}}, {"bad_token_ids": 400}, {"allowed_token_ids": 400}])
def test_ids_that_no_logit_belongs_to(keywords: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match=r"400 to 400; the model has 0 to 399"):
        request_sampling(**keywords).process(logits(), None)


def test_a_processor_of_another_shape() -> None:
    with pytest.raises(UnsupportedError, match=r"<lambda> returned \(400,\) for scores of shape \(1, 400\)"):
        request_sampling(processors=(lambda ids, scores: scores[0],)).process(logits(), PREFIXES)
