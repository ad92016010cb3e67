"""Measuring a model on the user's machine: stock and patched in turns, over the same requests."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hf_accel import stats

BASELINE = "stock"
Name = TypeVar("Name")
Result = TypeVar("Result")


# -- turns -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """Seconds of one generate(): all of it, to the first token, and of each step after that (0: none).

    per_step: the average; on a GPU the median, because graphs are captured in the first steps.
    """

    total: float
    first_token: float
    per_step: float


class Stopwatch(BaseStreamer):
    """Notes when generate hands out the prompt and then each token; calls `after_first` after the first token."""

    def __init__(self, after_first: Callable[[], object] | None = None) -> None:
        self.times: list[float] = []
        self.after_first = after_first

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        if self.after_first and len(self.times) == 2:
            self.after_first()

    def end(self) -> None:
        pass


def time_generate(
    model: Any,
    prompt: Tensor,
    *,
    num_new: int,
    after_first: Callable[[], object] | None = None,
    **keywords: Any,
) -> Generation:
    """Time a greedy generate() of exactly `num_new` tokens per row, as a user calls it. prompt: [B, T]."""
    stopwatch = Stopwatch(after_first)
    length = {"max_new_tokens": num_new, "min_new_tokens": num_new}
    start = time.perf_counter()
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, streamer=stopwatch, **length, **keywords
    )
    total = time.perf_counter() - start
    assert output.shape[1] == begun_with(model, prompt) + num_new
    first, last = stopwatch.times[1], stopwatch.times[-1]  # the prompt is handed out before
    per_step = (last - first) / max(1, num_new - 1)
    if prompt.device.type != "cpu" and num_new > 1:
        per_step = statistics.median(later - sooner for sooner, later in pairwise(stopwatch.times[1:]))
    return Generation(total, first - start, per_step)


def begun_with(model: Any, prompt: Tensor) -> int:
    """Return how many tokens of generate()'s rows are not new: those of a prompt [B, T], or one of a decoder's own."""
    return 1 if model.config.is_encoder_decoder else prompt.shape[1]


def finish(device: str) -> None:
    """Wait for the work of a device, which goes on after the call that started it."""
    if device != "cpu":
        torch.accelerator.synchronize(device)


def print_line(text: str) -> None:
    print(f"    {text}", flush=True)


def take_turns(
    candidates: Mapping[Name, Callable[[], Result]],
    *,
    rounds: int,
    warm_up: bool = True,
    report: Callable[[str], object] = print_line,
) -> dict[Name, list[Result]]:
    """Call each candidate once in every round, and return the results of `rounds` rounds after a round to warm up.

    Each round begins with another candidate, so that none always follows the same one. report: is called with the name
    of what runs next.
    """
    results: dict[Name, list[Result]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(0 if warm_up else 1, rounds + 1):
        first = number % len(names) if number else 0
        for name in (*names[first:], *names[:first]):
            report(f"{f'round {number} of {rounds}' if number else 'warm-up'}: {name}")
            result = candidates[name]()
            if number:
                results[name].append(result)
    return results


def ratios(baseline: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return for each round how many times faster it was than the baseline."""
    return [b / s for b, s in zip(baseline, seconds, strict=True)]


# -- requests ----------------------------------------------------------------------------------------


DISTRIBUTIONS: dict[str, Callable[[random.Random, float], float]] = {
    "fixed": lambda generator, mean: mean,
    "uniform": lambda generator, mean: generator.uniform(0, 2 * mean),
    "exponential": lambda generator, mean: generator.expovariate(1 / mean),
}


@dataclass(frozen=True)
class Requests:
    """prompts: token ids; lengths: of each, how many tokens are to be generated; arrivals: seconds from the start."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    arrivals: list[float] | None = None

    @property
    def useful(self) -> int:
        """The number of tokens that the requests ask for."""
        return sum(self.lengths)

    @property
    def needed(self) -> int:
        """The number of tokens that a model must compute without padding or sharing: the last generated one is never
        fed.
        """
        return sum(map(len, self.prompts)) + self.useful - len(self.lengths)

    @property
    def padded(self) -> int:
        """The number of tokens that one batch of equal rows computes."""
        return len(self.prompts) * (max(map(len, self.prompts)) + max(self.lengths) - 1)

    @property
    def variation(self) -> float:
        """The coefficient of variation of the drawn lengths."""
        return statistics.pstdev(self.lengths) / statistics.fmean(self.lengths)

    def first(self, count: int, *, most_new: int | None = None) -> Requests:
        """Return the first requests; none asks for more than `most_new` tokens."""
        lengths = [length if most_new is None else min(length, most_new) for length in self.lengths[:count]]
        return Requests(self.name, self.prompts[:count], lengths)


def draw(
    distribution: str, *, requests: int, mean: float, prompt_lengths: tuple[int, int], vocabulary: int, seed: int
) -> Requests:
    """Draw output lengths from `distribution` (see DISTRIBUTIONS), scaled to this mean; prompt lengths are uniform."""
    generator = random.Random(seed)
    sizes = [generator.randint(*prompt_lengths) for _ in range(requests)]
    prompts = [[generator.randrange(vocabulary) for _ in range(size)] for size in sizes]
    drawn = [DISTRIBUTIONS[distribution](generator, mean) for _ in range(requests)]
    scale = mean / statistics.fmean(drawn)
    lengths = [max(1, round(scale * length)) for length in drawn]
    return Requests(f"{distribution}, mean {mean:g}", prompts, lengths)


# -- requests computed -------------------------------------------------------------------------------


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


def one_padded_batch(model: Any, workload: Requests) -> Served:
    """Run one generate() over all prompts, padded on the left (for an encoder on the right), until the longest has
    ended.

    Tokens after a row's own end are dropped, which costs nothing: only ending rows one by one would be faster, and
    generate() cannot.
    """
    width = max(map(len, workload.prompts))
    rows = [[0] * (width - len(prompt)) + prompt for prompt in workload.prompts]
    seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts]
    if model.config.is_encoder_decoder:
        rows = [prompt + [0] * (width - len(prompt)) for prompt in workload.prompts]
        seen = [one[::-1] for one in seen]
    ids, mask = (torch.tensor(numbers, device=model.device) for numbers in (rows, seen))
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=mask, generation_config=greedy_config(max(workload.lengths)))
    seconds = time.perf_counter() - start
    found = output[:, begun_with(model, ids) :].tolist()
    return Served(seconds, [row[:length] for row, length in zip(found, workload.lengths, strict=True)])


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
