"""Prompts that begin alike: what is computed and stored of them once, and what that saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

import hf_accel
from hf_accel.cli.measurement import (
    BASELINE,
    Requests,
    Served,
    accelerated,
    greedy_config,
    one_padded_batch,
    take_turns,
)

from ..harness.bench import Bench
from ..harness.requests import median_ratio, shared_prefix
from ..harness.tables import Row, Table
from ..setups import accel, stock
from .batching import agreeing
from .serving import continuous, stock_settings

BLOCK = 16
NOTE = "Computed: tokens that went through the model. Stored: slots for K and V at the fullest moment, empty ones too."


def measure(bench: Bench) -> list[Table]:
    return [samples(bench), system_prompt(bench)]


def samples(bench: Bench) -> Table:
    """n continuations of one prompt."""
    settings = bench.settings
    prompt = bench.tokens(batch=1, length=settings.context)
    plain = bench.entrant(stock.Stock()).model
    candidates: dict[str, Callable[[], Served]] = {BASELINE: partial(sample, bench, plain, prompt)}
    for setup in (accel.EXACT, accel.INT8):
        candidates[setup.name] = partial(sample, bench, agreeing(bench, bench.entrant(setup)).model, prompt)
    count, new = settings.shared.samples, settings.shared.new_tokens
    title = f"{count} samples of one prompt of {settings.context} tokens, {new} new tokens each"
    print(f"  {title}", flush=True)
    runs = take_turns(candidates, rounds=settings.serving.rounds, warm_up=False)
    columns = settings.context + new - 1
    return Table(title, [row(name, count * columns, count * columns, runs) for name in runs], NOTE)


def sample(bench: Bench, model: Any, prompt: torch.Tensor) -> Served:
    settings = bench.settings
    torch.manual_seed(settings.seed)
    config = greedy_config(settings.shared.new_tokens)
    config.do_sample, config.num_return_sequences = True, settings.shared.samples
    start = time.perf_counter()
    if not hf_accel.is_patched(model):
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
        return Served(time.perf_counter() - start, output[:, prompt.shape[1] :].tolist())
    outputs = model.generate_batch(prompt.tolist(), generation_config=config)
    seconds = time.perf_counter() - start
    return Served(seconds, [output.generated_tokens for output in outputs.values()], hf_accel.stats(model))


def system_prompt(bench: Bench) -> Table:
    """Requests that share their beginning, all at once."""
    settings = bench.settings
    workload = shared_prefix(
        requests=settings.shared.requests,
        shared=settings.context,
        own=settings.shared.own,
        new=settings.shared.new_tokens,
        vocabulary=bench.model.config.vocab_size,
        seed=settings.seed,
    )
    plain = bench.entrant(stock.Stock()).model
    limits = stock_settings(workload, batch_tokens=settings.serving.choices[0][0])
    candidates: dict[str, Callable[[], Served]] = {
        BASELINE: partial(one_padded_batch, plain, workload),
        "stock generate_batch": partial(continuous, plain, workload, limits),
    }
    for setup in (accel.EXACT, accel.INT8):
        candidates[setup.name] = partial(accelerated, bench.entrant(setup).model, workload)
    print(f"  {workload.name}", flush=True)
    runs = take_turns(candidates, rounds=settings.serving.rounds, warm_up=False)
    for served in (one for results in runs.values() for one in results):
        served.checked(workload)
    title = f"{workload.name}, {settings.shared.own} of their own and {settings.shared.new_tokens} new ones each"
    note = f"{NOTE} Stock: one padded batch; how much of it stock's generate_batch finds shared, it does not tell."
    rows = [row(name, *padded_sizes(name, workload), runs) for name in runs]
    return Table(title, rows, note)


def padded_sizes(name: str, workload: Requests) -> tuple[int | None, int | None]:
    """Tokens that are computed and stored without sharing; None where nobody knows."""
    return (workload.padded, workload.padded) if name == BASELINE else (None, None)


def row(name: str, computed: int | None, stored: int | None, runs: Mapping[str, list[Served]]) -> Row:
    """computed, stored: what is to be said of a system that does not count them itself."""
    counts = runs[name][-1].statistics
    return {
        "system": name,
        "ratio": median_ratio([s.seconds for s in runs[BASELINE]], [s.seconds for s in runs[name]]),
        "generate_seconds": statistics.median(s.seconds for s in runs[name]),
        "computed_tokens": counts["computed_tokens"] if counts else computed,
        "stored_tokens": counts["blocks_used"] * BLOCK if counts else stored,
    }
