"""Processors that must be called once for each position are found out, and what a user holds is never called."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopPLogitsWarper,
)

from hf_accel.generation.sampling.purity import is_stateful, stateful_refusal

IDS = torch.tensor([[5, 3, 9, 3]])
number = 0
known = [3, 4]


class Counting:
    """Pushes another token with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, self.calls % scores.shape[1]] += 10
        return scores


class Uncopyable(Counting):
    """Pure, but who knows."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores

    def __deepcopy__(self, memo: object) -> Uncopyable:
        raise TypeError("not copied")


class Toggling(Counting):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls ^= 1
        return scores + self.calls


class Network(nn.Module):
    """May be as large as the model."""

    def forward(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


def noisy(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores + torch.rand_like(scores)


def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
    raise RuntimeError("never answers")


def numbering(input_ids: Tensor, scores: Tensor) -> Tensor:
    global number
    number += 1
    return scores * number


def remembering(input_ids: Tensor, scores: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(len(input_ids))
    return scores * len(seen)


def listing(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores.index_fill(1, torch.tensor(known), 0.0)


def closure(held: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda input_ids, scores: held(input_ids, scores)


def recursive() -> Callable[[Tensor, Tensor], Tensor]:
    def process(input_ids: Tensor, scores: Tensor, depth: int = 3) -> Tensor:
        return process(input_ids, scores + 1, depth - 1) if depth else scores

    return process


def constrained(held: Any) -> PrefixConstrainedLogitsProcessor:
    """A processor of transformers' around a function of the user's."""

    def allowed(batch_id: int, ids: Tensor) -> list[int]:
        return held(ids[None], torch.zeros(1, 32))[0].topk(4).indices.tolist()

    return PrefixConstrainedLogitsProcessor(allowed, 1)


def counters(processor: Any) -> list[Counting]:
    """The Counting that a processor holds, wherever."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        return counters(processor._prefix_allowed_tokens_fn)
    if isinstance(processor, functools.partial):
        return counters(processor.func)
    cells = [cell.cell_contents for cell in getattr(processor, "__closure__", None) or ()]
    held = [processor, getattr(processor, "__self__", None), *cells]
    return [each for each in held if isinstance(each, Counting)]


@pytest.mark.parametrize("processor", [
    Counting(), Toggling(), Uncopyable(), noisy, broken, numbering, remembering, Network(), closure(Network()),
    closure(Counting()), closure(Uncopyable()), closure(closure(numbering)), Counting().__call__,
    Uncopyable().__call__, functools.partial(Counting()), functools.partial(closure(Counting())),
    constrained(Counting()),
])  # fmt: skip
def test_stateful(processor: Any) -> None:
    assert is_stateful(processor, IDS, 32)
    name = getattr(processor, "__name__", type(processor).__name__)
    assert stateful_refusal([listing, processor], IDS, 32) == (
        f"the logits processor {name} keeps a state, or cannot be copied to find out, and a position is processed "
        "again after a draft was rejected"
    )
    assert all(each.calls == 0 for each in counters(processor)), "the user's own object was called"
    assert number == 0 and not remembering.__defaults__[0]  # type: ignore[index]


@pytest.mark.parametrize(
    "processor",
    [
        lambda input_ids, scores: scores.fill_(-torch.inf),
        listing,
        closure(listing),
        recursive(),
        functools.partial(listing),
        constrained(listing),
        NoRepeatNGramLogitsProcessor(2),
        RepetitionPenaltyLogitsProcessor(1.2),
        SequenceBiasLogitsProcessor({(1, 2): 1.0, (3,): -1.0}),  # prepares itself when first called
        NoBadWordsLogitsProcessor([[3]]),
        TopPLogitsWarper(0.9),
    ],
)
def test_pure(processor: Any) -> None:
    assert not is_stateful(processor, IDS, 32)
    assert stateful_refusal([processor], IDS, 32) is None


def test_it_is_asked_about_the_prompt_and_what_it_allows() -> None:
    """A processor that knows only its own prompts, such as a trie, does not raise."""

    class Trie:
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            allowed = {(5, 3, 9, 3): 7, (5, 3, 9, 3, 7): 8}[tuple(input_ids[0].tolist())]
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([allowed]), 0.0)

    assert not is_stateful(Trie(), IDS, 32)


def test_asking_changes_nothing() -> None:
    processor, state = Counting(), torch.get_rng_state()
    before = copy.deepcopy(vars(processor))
    is_stateful(processor, IDS, 32)
    is_stateful(noisy, IDS, 32)
    assert vars(processor) == before
    assert torch.equal(torch.get_rng_state(), state)
