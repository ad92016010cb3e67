"""Requests that only benchmarks make, ways to serve them one by one, and what their rounds say."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_accel.cli.measurement import Requests, Served, greedy_config, ratios

Serve = Callable[[PreTrainedModel, Requests], Served]


def spread_share(seconds: Sequence[float]) -> float:
    """Return the difference between the slowest and the fastest round, as a share of the median."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def median_ratio(baseline: Sequence[float], seconds: Sequence[float]) -> float:
    """Return how many times faster than the baseline, which ran in the same rounds."""
    return statistics.median(ratios(baseline, seconds))


def poisson(workload: Requests, *, per_second: float, seed: int) -> Requests:
    """Return the same requests with random arrivals at this rate, the first at once."""
    generator = random.Random(seed)
    gaps = [0.0, *(generator.expovariate(per_second) for _ in workload.prompts[1:])]
    return Requests(workload.name, workload.prompts, workload.lengths, list(accumulate(gaps)))


def shared_prefix(*, requests: int, shared: int, own: int, new: int, vocabulary: int, seed: int) -> Requests:
    """Make prompts that begin with the same `shared` tokens, followed by `own` different ones."""
    tokens = _tokens(random.Random(seed), vocabulary)
    system = [next(tokens) for _ in range(shared)]
    prompts = [system + [next(tokens) for _ in range(own)] for _ in range(requests)]
    return Requests(f"{requests} requests after {shared} shared tokens", prompts, [new] * requests)


def _tokens(generator: random.Random, vocabulary: int) -> Iterator[int]:
    while True:
        yield generator.randrange(vocabulary)


def in_turn(model: Any, workload: Requests) -> Served:
    """Run a generate() for each prompt."""
    start = time.perf_counter()
    tokens = []
    for prompt, length in zip(workload.prompts, workload.lengths, strict=True):
        ids = torch.tensor([prompt], device=model.device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy_config(length))
        tokens.append(output[0, len(prompt) :].tolist())
    return Served(time.perf_counter() - start, tokens)
