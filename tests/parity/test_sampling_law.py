"""Sampled tokens have the model's own law, whoever drafts: chi-square over whole texts, through the whole engine.

The joint law of three tokens over a vocabulary of three is computed by running stock's model and stock's processors on
every prefix. With 26 degrees of freedom at a level of one in a thousand, 20,000 draws find a chi-square distance
sum((p - q)^2 / p) of .00325 with a power of 99 % (4,000 draws: .016). A greedy draft that claims to be drawn, the
defect found in the wild (E1), is 10 times as far away: `test_a_draft_that_lies_is_found` sees it.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import hf_accel
from hf_accel import Draft, Drafter, Engine, SpeculativeConfig

from ..unit.generation.chi_square import chi_square, critical
from .families import DECODER

LENGTH = 3
PROMPTS = [[1], [0, 2, 1, 0, 2], [2, 2], [1, 0, 1, 0, 1, 0, 1, 0]]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.6},
    "top-k": {"temperature": 0.8, "top_k": 2},
    "top-p": {"top_p": 0.8},
    "penalty": {"repetition_penalty": 1.8},
}


@functools.cache
def tiny(seed: int = 0, noise: float = 0.0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(**DECODER | {"vocab_size": 3, "pad_token_id": None, "initializer_range": 0.15})
        model = LlamaForCausalLM(config).eval()
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += noise * torch.randn_like(parameter)
    return model


@functools.cache
def target(block_size: int = 16) -> PreTrainedModel:
    model = LlamaForCausalLM(tiny().config).eval()
    model.load_state_dict(tiny().state_dict())
    return hf_accel.patch(model, weights=None, cache=hf_accel.CacheConfig(block_size=block_size))


def processors(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, repetition_penalty: float = 1.0) -> Any:
    chosen: list[Any] = [RepetitionPenaltyLogitsProcessor(repetition_penalty), TemperatureLogitsWarper(temperature)]
    if top_k:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chosen.append(TopPLogitsWarper(top_p))
    return LogitsProcessorList(chosen)


@torch.no_grad()
def law(prompt: list[int], end: int | None, **settings: Any) -> dict[tuple[int, ...], float]:
    """The probability of each text of LENGTH tokens, or of fewer with `end` as the last."""
    found: dict[tuple[int, ...], float] = {}
    process = processors(**settings)

    def visit(text: tuple[int, ...], probability: float) -> None:
        if len(text) == LENGTH or (text and text[-1] == end):
            found[text] = found.get(text, 0.0) + probability
            return
        ids = torch.tensor([[*prompt, *text]])
        scores = process(ids, tiny()(ids).logits[:, -1].float())
        for token, p in enumerate(scores.double().softmax(-1)[0].tolist()):
            if p > 0:
                visit((*text, token), probability * p)

    visit((), 1.0)
    return found


def statistic(drawn: dict[int, collections.Counter[tuple[int, ...]]], end: int | None, **settings: Any) -> bool:
    """Whether all prompts together pass. Cells of fewer than 5 expected draws are one."""
    total, degrees = 0.0, 0
    for number, counts in drawn.items():
        exact = law(PROMPTS[number], end, **settings)
        assert set(counts) <= set(exact), "an impossible text was drawn"
        size = counts.total()
        cells = sorted(((p * size, counts[text]) for text, p in exact.items()), reverse=True)
        small = [cell for cell in cells if cell[0] < 8]
        cells = [cell for cell in cells if cell[0] >= 8]
        if small:
            merged = [sum(column) for column in zip(*small, strict=True)]
            cells = [*cells, (merged[0], int(merged[1]))] if merged[0] >= 8 else cells
        rest = size - sum(count for _, count in cells)
        missing = size - sum(expected for expected, _ in cells)
        if missing > 1e-6 * size and cells:  # what is still too little goes to the smallest cell
            cells[-1] = (cells[-1][0] + missing, cells[-1][1] + rest)
        total += chi_square([count for _, count in cells], [expected for expected, _ in cells])
        degrees += len(cells) - 1
    return total < critical(degrees)


def by_engine(
    draws: int,
    numbers: list[int],
    config: Any,
    sampling: Any,
    *,
    end: int | None = None,
    block_size: int = 16,
    **options: Any,
) -> dict[int, collections.Counter[tuple[int, ...]]]:
    drawn: dict[int, collections.Counter[tuple[int, ...]]] = collections.defaultdict(collections.Counter)
    ends = () if end is None else (end,)
    with Engine(target(block_size), speculative=config, token_budget=None, **options) as engine:
        handles = [
            (number, engine.submit(
                PROMPTS[number], max_new_tokens=LENGTH + 2, n=25, seed=1000 * i, stop_token_ids=ends,
                **{"temperature": 1.0} | sampling,
            ))
            for i in range(draws // (25 * len(numbers))) for number in numbers
        ]  # fmt: skip
        for number, handle in handles:
            for result in handle.results(100):
                drawn[number][tuple(result.tokens[:LENGTH])] += 1
        assert "max_tokens" not in options or engine.stats["preemptions"] > 0
        assert config is None or engine.stats["speculation"]["drafted"] > draws / 2
    return drawn


DRAFTERS: dict[str, Any] = {
    "model": lambda: tiny(1, 0.08),
    "self-int4": lambda: "self-int4",
    "guess": lambda: Guess(),
}


class Guess(Drafter):
    """Looked up or not, tokens that were not drawn: the last ones again."""

    name = "guess"

    def propose(self, sequences: Any, lengths: Any) -> list[Draft]:
        return [Draft(s.tokens[-length:]) if length else Draft() for s, length in zip(sequences, lengths, strict=True)]


class Liar(Drafter):
    """Proposes the likeliest token and says that it was drawn."""

    name = "liar"

    @torch.no_grad()
    def propose(self, sequences: Any, lengths: Any) -> list[Draft]:
        return [
            self._one(sequence.tokens) if length else Draft()
            for sequence, length in zip(sequences, lengths, strict=True)
        ]

    @staticmethod
    @functools.cache
    def _law(tokens: tuple[int, ...]) -> Any:
        return tiny(1, 0.08)(torch.tensor([tokens])).logits[0, -1].softmax(-1)

    def _one(self, tokens: list[int]) -> Draft:
        q = self._law(tuple(tokens))
        return Draft([int(q.argmax())], q[None])


def config_of(drafter: str, verify: Any, num_draft: int = 3) -> SpeculativeConfig:
    return SpeculativeConfig(drafter=DRAFTERS[drafter](), num_draft=num_draft, verify=verify)


@pytest.mark.parametrize(
    ("drafter", "verify", "way"),
    [pytest.param("model", "token", "penalty", marks=pytest.mark.long), ("self-int4", "block", "top-p")],
)
def test_the_law_of_three_tokens(drafter: str, verify: str, way: str) -> None:
    drawn = by_engine(4000, [0, 1], config_of(drafter, verify), WAYS[way])
    assert statistic(drawn, None, **WAYS[way])


def test_a_draft_that_lies_is_found() -> None:
    config = SpeculativeConfig(drafter=Liar(), num_draft=1)
    assert not statistic(by_engine(2000, [0, 1], config, {}), None)


SITUATIONS: dict[str, tuple[list[int], int | None, int, dict[str, Any]]] = {
    "one prompt": ([0], None, 16, {"max_running": 500}),
    "ragged, ends": ([0, 1, 2, 3], 2, 1, {"max_running": 500}),
    "scarce": ([0, 1, 2, 3], None, 1, {"max_tokens": 60}),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("drafter", "verify", "way", "situation"),
    [
        ("none", "token", "hot", "ragged, ends"),
        ("model", "token", "penalty", "ragged, ends"),
        ("model", "token", "hot", "scarce"),
        ("model", "block", "hot", "one prompt"),
        ("model", "block", "penalty", "scarce"),
        ("model", "seeded", "top-k", "ragged, ends"),
        ("self-int4", "token", "top-p", "ragged, ends"),
        ("self-int4", "block", "plain", "scarce"),
        ("guess", "token", "top-p", "scarce"),
    ],
)
def test_the_law_everywhere(drafter: str, verify: str, way: str, situation: str) -> None:
    numbers, end, block_size, options = SITUATIONS[situation]
    config = None if drafter == "none" else config_of(drafter, verify)
    draws = 10_000 if "max_tokens" in options else 20_000  # preemption takes its time
    drawn = by_engine(draws, numbers, config, WAYS[way], end=end, block_size=block_size, **options)
    assert statistic(drawn, end, **WAYS[way])
