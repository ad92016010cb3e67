"""Requests computed at once or one by one, and how long all of them took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_accel import stats

from .requests import Requests


class WrongResultError(Exception):
    """A model's logits or tokens are not those of stock; it must not be timed."""


@dataclass(frozen=True)
class Served:
    """seconds: of the whole workload. tokens: generated for each request, in order. statistics: the engine's own.
    times: when each token was there, if that was asked for.
    """

    seconds: float
    tokens: list[list[int]]
    statistics: dict[str, Any] = field(default_factory=dict)
    times: list[list[float]] = field(default_factory=list)

    @property
    def decode_seconds(self) -> float:
        """The seconds from the moment at which every request has its first token to the last token of all."""
        return max(times[-1] for times in self.times) - max(times[0] for times in self.times)

    def checked(self, workload: Requests) -> Served:
        """Return itself, if every request got the number of tokens that it asked for."""
        got = [len(tokens) for tokens in self.tokens]
        if got != workload.lengths:
            raise WrongResultError(f"{workload.name}: asked for {workload.lengths} tokens and got {got}")
        return self


Serve = Callable[[PreTrainedModel, Requests], Served]


def one_padded_batch(model: Any, workload: Requests) -> Served:
    """Run one generate() over all prompts, padded on the left, until the longest has ended.

    Tokens after a row's own end are dropped, which costs nothing: only ending rows one by one would be faster, and
    generate() cannot.
    """
    width = max(map(len, workload.prompts))
    rows = [[0] * (width - len(prompt)) + prompt for prompt in workload.prompts]
    seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts]
    ids, mask = (torch.tensor(numbers, device=model.device) for numbers in (rows, seen))
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=mask, generation_config=greedy_config(max(workload.lengths)))
    seconds = time.perf_counter() - start
    found = output[:, width:].tolist()
    return Served(seconds, [row[:length] for row, length in zip(found, workload.lengths, strict=True)])


def in_turn(model: Any, workload: Requests) -> Served:
    """Run a generate() for each prompt."""
    start = time.perf_counter()
    tokens = []
    for prompt, length in zip(workload.prompts, workload.lengths, strict=True):
        ids = torch.tensor([prompt], device=model.device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config(length))
        tokens.append(output[0, len(prompt) :].tolist())
    return Served(time.perf_counter() - start, tokens)


def accelerated(model: Any, workload: Requests, **keywords: Any) -> Served:
    """Run hf_accel's generate_batch with a GenerationConfig for each prompt."""
    configs = [greedy_config(length) for length in workload.lengths]
    start = time.perf_counter()
    outputs = model.generate_batch(workload.prompts, generation_config=configs, **keywords)
    seconds = time.perf_counter() - start
    times = [output.timestamps or [] for output in outputs.values()]
    return Served(seconds, [output.generated_tokens for output in outputs.values()], stats(model), times)


def greedy_config(new_tokens: int) -> GenerationConfig:
    """Return a greedy config for exactly `new_tokens` tokens, which ignores the end-of-text token."""
    keywords = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    return GenerationConfig(**keywords)  # type: ignore[no-untyped-call]
