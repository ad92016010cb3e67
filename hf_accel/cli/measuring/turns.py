"""Seconds: of generate() token by token, and of several candidates in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

BASELINE = "stock"
Name = TypeVar("Name")
Result = TypeVar("Result")


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
    assert output.shape[1] == prompt.shape[1] + num_new
    first, last = stopwatch.times[1], stopwatch.times[-1]  # the prompt is handed out before
    per_step = (last - first) / max(1, num_new - 1)
    if prompt.device.type != "cpu" and num_new > 1:
        per_step = statistics.median(later - sooner for sooner, later in pairwise(stopwatch.times[1:]))
    return Generation(total, first - start, per_step)


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


def spread_share(seconds: Sequence[float]) -> float:
    """Return the difference between the slowest and the fastest round, as a share of the median."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def median_ratio(baseline: Sequence[float], seconds: Sequence[float]) -> float:
    """Return how many times faster than the baseline, which ran in the same rounds."""
    return statistics.median(ratios(baseline, seconds))


def ratios(baseline: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return for each round how many times faster it was than the baseline."""
    return [b / s for b, s in zip(baseline, seconds, strict=True)]
