"""A whole generate() at batch 1, prompt included, as a user calls it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial

from hf_accel.cli.measurement import BASELINE, Generation, take_turns, time_generate

from ..harness.bench import Bench, Entrant
from ..harness.requests import median_ratio, spread_share
from ..harness.tables import Row, Table
from .decode import kv_bytes

NOTE = (
    "Ratio: of the whole call to stock's; step ratio: of the tokens after the first. Share of the measured read "
    "bandwidth that a step's weights and KV cache come to."
)


def measure(bench: Bench) -> list[Table]:
    return [table(bench, bench.entrants)]


def table(bench: Bench, entrants: Mapping[str, Entrant]) -> Table:
    candidates = {name: partial(run, bench, entrant) for name, entrant in entrants.items()}
    runs = take_turns(candidates, rounds=bench.settings.rounds, warm_up=False)
    rows = [row(bench, entrants[name], runs) for name in runs]
    title = f"generate(): {bench.settings.new_tokens} tokens after {bench.settings.context}, batch 1"
    return Table(title, rows, NOTE)


def run(bench: Bench, entrant: Entrant) -> Generation:
    prompt = bench.tokens(batch=1, length=bench.settings.context)
    return time_generate(entrant.model, prompt, num_new=bench.settings.new_tokens)


def row(bench: Bench, entrant: Entrant, runs: dict[str, list[Generation]]) -> Row:
    results, stock = runs[entrant.setup.name], runs[BASELINE]
    step = statistics.median(result.per_step for result in results)
    step_bytes = entrant.setup.read_bytes(entrant.model)
    step_bytes += kv_bytes(bench, entrant, batch=1, context=bench.settings.context)
    return {
        "setup": entrant.setup.name,
        "ratio": median_ratio([r.total for r in stock], [r.total for r in results]),
        "step_ratio": median_ratio([r.per_step for r in stock], [r.per_step for r in results]),
        "generate_seconds": statistics.median(result.total for result in results),
        "spread_share": spread_share([result.total for result in results]),
        "first_token_seconds": statistics.median(result.first_token for result in results),
        "step_seconds": step,
        "bandwidth_share": step_bytes / step / bench.bandwidth,
    }
