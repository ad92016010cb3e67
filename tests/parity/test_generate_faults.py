"""What a user's own functions raise in generate(): it reaches the caller, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria

import hf_accel
from hf_accel import Draft, Drafter, SpeculativeConfig

from .families import VOCABULARY, build
from .speculating import stock

SETTINGS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
CAUSES = [RuntimeError("mine"), KeyboardInterrupt(), SystemExit(3)]


class Counter:
    """Raises at one of its calls."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.left, self.error = at, error

    def count(self) -> None:
        self.left -= 1
        if not self.left:
            raise self.error


class Streamer(Counter):
    def put(self, value: Tensor) -> None:
        self.count()

    def end(self) -> None:
        pass


class Processor(Counter):
    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.count()
        return scores


class Criterion(Counter, StoppingCriteria):
    def __call__(self, ids: Tensor, scores: Any, **rest: Any) -> Tensor:
        self.count()
        return torch.zeros(len(ids), dtype=torch.bool)


class OwnDrafter(Counter, Drafter):
    name = "own"

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__(at, error)
        self.known: set[Any] = set()

    def propose(self, sequences: Any, lengths: Any) -> list[Draft]:
        self.known |= set(sequences)
        self.count()
        return [Draft([1] * length) for length in lengths]

    def forget(self, sequence: Any) -> None:
        self.known.discard(sequence)


def keywords(kind: type, at: int, error: BaseException) -> dict[str, Any]:
    thing = kind(at, error)
    if kind is Streamer:
        return {"streamer": thing}
    if kind is OwnDrafter:
        return {"speculative": SpeculativeConfig(drafter=thing, num_draft=2)}
    return {"logits_processor": [thing]} if kind is Processor else {"stopping_criteria": [thing]}


def prompts(rows: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, 7), generator=torch.Generator().manual_seed(rows))


def blocks(cache: hf_accel.PagedCache) -> int:
    return sum(group.pool.num_used for group in cache.pages.groups)


@pytest.mark.covering(1)
@pytest.mark.parametrize("error", CAUSES, ids=repr)
@pytest.mark.parametrize("kind", [Streamer, Processor, Criterion, OwnDrafter])
def test_an_error_of_the_users_reaches_the_caller(kind: type, error: BaseException) -> None:
    """The cache that was passed along holds what it held, and goes on."""
    model = hf_accel.patch(build("llama"), weights=None)
    ids = prompts(1)
    cache = hf_accel.PagedCache(model.config, block_size=4)
    first = model.generate(ids, past_key_values=cache, **SETTINGS)
    held = blocks(cache)
    for at in (1, 2, 4):
        with pytest.raises(type(error)) as caught:
            model.generate(first, past_key_values=cache, **SETTINGS, **keywords(kind, at, error))
        assert caught.value is error and blocks(cache) == held
    again = model.generate(first, past_key_values=cache, **SETTINGS)
    assert torch.equal(again, stock("llama").generate(first, **SETTINGS))


class BadEnd(Streamer):
    def end(self) -> None:
        raise self.error


def test_a_streamer_that_fails_at_the_end_takes_no_pages_along() -> None:
    """The row has ended by then, and its pages wait to be left in the cache."""
    model = hf_accel.patch(build("llama"), weights=None)
    cache = hf_accel.PagedCache(model.config, block_size=4)
    with pytest.raises(RuntimeError, match="mine"):
        model.generate(prompts(1), past_key_values=cache, **SETTINGS, streamer=BadEnd(-1, RuntimeError("mine")))
    assert blocks(cache) == 0
    expected = stock("llama").generate(prompts(1), **SETTINGS)
    assert torch.equal(model.generate(prompts(1), past_key_values=cache, **SETTINGS), expected)


@pytest.mark.parametrize("error", CAUSES[1:], ids=repr)
def test_an_interrupt_in_generate_batch_is_the_callers(error: BaseException) -> None:
    """Not the outcome of one of its prompts; and a drafter of the user's own is told that they have ended."""
    model = hf_accel.patch(build("llama"), weights=None)
    inputs = prompts(3).tolist()
    drafter = OwnDrafter(2, error)
    with pytest.raises(type(error)) as caught:
        model.generate_batch(inputs, **SETTINGS, speculative=SpeculativeConfig(drafter=drafter, num_draft=2))
    assert caught.value is error and not drafter.known
    outputs = model.generate_batch(inputs, **SETTINGS)
    answer = stock("llama").generate(prompts(3), **SETTINGS)
    assert [output.generated_tokens for output in outputs.values()] == answer[:, 7:].tolist()


@pytest.mark.parametrize("cause", ["nan", "nothing"])
def test_greedy_search_without_a_likeliest_token_is_transformers(cause: str) -> None:
    """Its argmax names the first NaN, or token 0 where all are ruled out."""
    model = build("llama")
    settings = SETTINGS | {"repetition_penalty": 1.5}
    if cause == "nothing":
        settings |= {"suppress_tokens": list(range(VOCABULARY))}
    else:
        model.lm_head.weight.data[7] = torch.nan
    expected = model.generate(prompts(2), **settings)
    hf_accel.patch(model, weights=None)
    with pytest.warns(hf_accel.HfAccelWarning, match="transformers' own loop.*hold NaN or are all -inf"):
        assert torch.equal(model.generate(prompts(2), **settings), expected)
    outputs = model.generate_batch(prompts(2).tolist(), **settings)
    assert all("hold NaN" in str(output.error) for output in outputs.values())
