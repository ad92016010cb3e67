"""A model of a few million parameters: it fits in a cache, and time goes to what lies between the products."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

from hf_accel.cli.measurement import BASELINE, Generation, take_turns, time_generate

from ..harness.bench import Bench, Entrant
from ..harness.requests import median_ratio
from ..harness.tables import Table
from ..setups import accel, stock

SHIPPED = Path(__file__).parents[2] / "examples" / "stdlib-tiny"
BATCHES = (1, 8)
MOST_CONTEXT = 64
ROUNDS = 3  # per round that is asked for: it takes a fraction of a second


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings
    small = Bench(replace(settings, model=str(SHIPPED), layers=None, context=min(MOST_CONTEXT, settings.context)))
    entrants = [small.entrant(setup) for setup in (stock.Stock(), accel.EXACT, accel.INT8, accel.INT4, accel.AUTO)]
    return [table(small, entrants, batch) for batch in (BATCHES[:1] if settings.quick else BATCHES)]


def table(bench: Bench, entrants: list[Entrant], batch: int) -> Table:
    print(f"  batch {batch}", flush=True)
    candidates = {entrant.setup.name: partial(run, bench, entrant, batch) for entrant in entrants}
    runs = take_turns(candidates, rounds=bench.settings.rounds * (1 if bench.settings.quick else ROUNDS))
    rows = [
        {
            "setup": name,
            "ratio": median_ratio([r.total for r in runs[BASELINE]], [r.total for r in results]),
            "generate_seconds": statistics.median(r.total for r in results),
            "first_token_seconds": statistics.median(r.first_token for r in results),
            "step_seconds": statistics.median(r.per_step for r in results),
        }
        for name, results in runs.items()
    ]
    lengths = f"{bench.settings.new_tokens} tokens after {bench.settings.context}"
    title = f"generate(): {lengths}, batch {batch}, examples/{SHIPPED.name}"
    return Table(title, rows, "Ratio of the whole call to stock's. The weights fit in the last cache.")


def run(bench: Bench, entrant: Entrant, batch: int) -> Generation:
    prompt = bench.tokens(batch=batch, length=bench.settings.context)
    return time_generate(entrant.model, prompt, num_new=bench.settings.new_tokens)
