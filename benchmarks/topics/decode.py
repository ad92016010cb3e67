"""Decode: what one step of generate() costs, by batch, after a context of 512 tokens and after one of 8192."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import hf_accel
from hf_accel.cli.measurement import BASELINE, Generation, take_turns, time_generate

from ..harness.bench import Bench, Entrant
from ..harness.requests import median_ratio, spread_share
from ..harness.tables import Row, Table
from ..setups import accel

Runs = dict[str, list[Generation]]
NOTE = "Share of the measured read bandwidth that the step's weights and KV cache come to."
FILLED = "generate() starts from a cache of random keys and values."


def measure(bench: Bench) -> Iterator[Table]:
    for batch in bench.settings.batches:
        yield step_table(bench, bench.entrants, batch=batch, context=bench.settings.context)


def measure_long(bench: Bench) -> Iterator[Table]:
    """Of setups that attend in their own way, and our INT8 also with INT8 keys and values."""
    entrants = {entrant.setup.name: entrant for entrant in map(bench.entrant, attending(bench))}
    if accel.INT8.name in entrants:
        entrants[accel.INT8_KV.name] = Entrant(accel.INT8_KV, entrants[accel.INT8.name].model, 0.0, {})
    context = bench.settings.long_context
    note = "Setups that attend as stock does are left out."
    for batch in bench.settings.long_batches:
        yield step_table(bench, entrants, batch=batch, context=context, note=note)


def attending(bench: Bench) -> list[accel.Setup]:
    return [setup for setup in bench.setups if setup.attends or setup.name == BASELINE]


def step_table(bench: Bench, entrants: Mapping[str, Entrant], *, batch: int, context: int, note: str = "") -> Table:
    print(f"  batch {batch}, context {context}", flush=True)
    candidates: dict[str, Callable[[], Generation]] = {
        name: partial(run_one, bench, entrant, batch=batch, context=context) for name, entrant in entrants.items()
    }
    # no warm-up: the first step of each generate() is not counted
    runs = take_turns(candidates, rounds=bench.settings.rounds, warm_up=False)
    rows = [step_row(bench, entrants[name], runs, batch=batch, context=context) for name in runs]
    notes = [NOTE, "" if bench.settings.prompted else FILLED, note]
    return Table(f"decode step, batch {batch}, context {context}", rows, " ".join(filter(None, notes)))


def run_one(bench: Bench, entrant: Entrant, *, batch: int, context: int) -> Generation:
    prompt = bench.tokens(batch=batch, length=context + 1)
    if bench.settings.prompted:
        return time_generate(entrant.model, prompt, num_new=bench.settings.batch_tokens)
    cache = bench.filled_cache(entrant, batch=batch, tokens=context)
    return time_generate(entrant.model, prompt, num_new=bench.settings.batch_tokens, past_key_values=cache)


def step_row(bench: Bench, entrant: Entrant, runs: Runs, *, batch: int, context: int) -> Row:
    name = entrant.setup.name
    seconds = {who: [run.per_step for run in results] for who, results in runs.items()}
    median = statistics.median(seconds[name])
    step_bytes = entrant.setup.read_bytes(entrant.model) + kv_bytes(bench, entrant, batch=batch, context=context)
    return {
        "setup": name,
        "ratio": median_ratio(seconds[BASELINE], seconds[name]),
        "step_seconds": median,
        "spread_share": spread_share(seconds[name]),
        "tokens_per_second": batch / median,
        "bandwidth_share": step_bytes / median / bench.bandwidth,
    }


def kv_bytes(bench: Bench, entrant: Entrant, *, batch: int, context: int) -> int:
    config, dtype, kv_dtype = bench.model.config, bench.model.dtype, entrant.setup.kv_dtype
    return hf_accel.estimate(
        config, context=context, batch=batch, dtype=dtype, kv_dtype=kv_dtype, bandwidth=1.0
    ).kv_bytes
