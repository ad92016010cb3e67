"""Decode: what one step of generate() costs, by batch; and a whole generate() at batch 1."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import hf_accel

from .bench import Bench, Entrant
from .models import read_bytes
from .tables import Row, Table
from .timing import BASELINE, Generation, median_ratio, take_turns, time_generate

Runs = dict[str, list[Generation]]


def measure(bench: Bench) -> list[Table]:
    tables, whole = [], None
    for batch in bench.settings.batches:
        print(f"  batch {batch}", flush=True)
        runs = time_batch(bench, batch)
        tables.append(Table(step_title(bench, batch), step_rows(bench, runs, batch), step_note(batch)))
        whole = runs if batch == 1 else whole
    if whole is not None:
        title = f"generate(): {bench.settings.new_tokens} tokens after {bench.settings.context}, batch 1"
        tables.insert(0, Table(title, generate_rows(bench, whole), "Ratio of the whole call to stock's."))
    return tables


def time_batch(bench: Bench, batch: int) -> Runs:
    run = run_whole if batch == 1 else run_filled
    candidates: dict[str, Callable[[], Generation]] = {
        name: partial(run, bench, entrant, batch) for name, entrant in bench.entrants.items()
    }
    return take_turns(candidates, rounds=bench.settings.rounds)


def run_whole(bench: Bench, entrant: Entrant, batch: int) -> Generation:
    prompt = bench.tokens(batch=batch, length=bench.settings.context)
    return time_generate(entrant.model, prompt, num_new=bench.settings.new_tokens)


def run_filled(bench: Bench, entrant: Entrant, batch: int) -> Generation:
    context = bench.settings.context
    cache = bench.filled_cache(entrant, batch=batch, tokens=context)
    prompt = bench.tokens(batch=batch, length=context + 1)
    return time_generate(entrant.model, prompt, num_new=bench.settings.batch_tokens, past_key_values=cache)


def step_title(bench: Bench, batch: int) -> str:
    return f"decode step, batch {batch}, context {bench.settings.context}"


def step_note(batch: int) -> str:
    note = "Share of the measured read bandwidth that the step's weights and KV cache come to."
    return note if batch == 1 else f"{note} generate() starts from a cache of random keys and values."


def step_rows(bench: Bench, runs: Runs, batch: int) -> list[Row]:
    return [step_row(bench, name, runs, batch) for name in runs]


def step_row(bench: Bench, name: str, runs: Runs, batch: int) -> Row:
    seconds = {who: [run.per_step for run in results] for who, results in runs.items()}
    median = statistics.median(seconds[name])
    step_bytes = read_bytes(bench.entrants[name].model) + kv_bytes(bench, batch)
    return {
        "setup": name,
        "ratio": median_ratio(seconds[BASELINE], seconds[name]),
        "step_seconds": median,
        "tokens_per_second": batch / median,
        "bandwidth_share": step_bytes / median / bench.bandwidth,
    }


def kv_bytes(bench: Bench, batch: int) -> int:
    config, dtype = bench.model.config, bench.model.dtype
    estimate = hf_accel.estimate(config, context=bench.settings.context, batch=batch, dtype=dtype, bandwidth=1.0)
    return estimate.kv_bytes


def generate_rows(bench: Bench, runs: Runs) -> list[Row]:
    totals = {name: [run.total for run in results] for name, results in runs.items()}
    return [
        {
            "setup": name,
            "ratio": median_ratio(totals[BASELINE], totals[name]),
            "generate_seconds": statistics.median(totals[name]),
            "first_token_seconds": statistics.median(run.first_token for run in results),
            "tokens_per_second": bench.settings.new_tokens / statistics.median(totals[name]),
        }
        for name, results in runs.items()
    ]
