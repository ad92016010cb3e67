"""Many requests at once: useful tokens per second against stock's padded batch and stock's continuous batching."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hf_accel.cli.measurement import DISTRIBUTIONS, Requests, Served, accelerated, draw, one_padded_batch, take_turns

from ..harness.bench import Bench, Entrant
from ..harness.requests import Serve, median_ratio
from ..harness.tables import Row, Table
from ..setups import accel, stock
from .serving import agree, best_settings, continuous, stock_settings

PADDED, CONTINUOUS = "stock, one padded batch", "stock generate_batch"
SEARCH_TOKENS = 4  # of each request, while stock's best settings are looked for
NOTE = (
    "Ratio: to the padded batch; generate batch ratio: to stock's generate_batch, each request with its own "
    "max_new_tokens, with the settings that a search found best ({batch_tokens} tokens a pass, {running} requests at "
    "once). Useful: tokens that were asked for; the padded "
    "batch runs to its longest row. Waste: computed tokens that nobody needed, padding and ended rows."
)
Results = Mapping[str, Sequence[Served]]


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings
    systems = make_systems(bench)
    mean = settings.serving.means[len(settings.serving.means) // 2]
    main = workload(bench, "exponential", mean)
    note = make_note(bench, systems, main)
    few = {name: systems[name] for name in (PADDED, CONTINUOUS, accel.INT8.name)}
    workloads = [
        workload(bench, distribution, mean) for distribution in DISTRIBUTIONS if distribution != "exponential"
    ]
    workloads += [workload(bench, "exponential", other) for other in settings.serving.means if other != mean]
    runs = {main.name: serve(bench, systems, main)}
    runs |= {one.name: serve(bench, few, one) for one in workloads}
    workloads = sorted([*workloads, main], key=lambda one: one.name.startswith("exponential") and one.useful)
    tables = [table(main, runs[main.name], note), trend(workloads, runs)]
    if settings.serving.many:
        many = workload(bench, "exponential", min(settings.serving.means), requests=settings.serving.many)
        tables.append(table(many, serve(bench, few, many), note))
    return tables


def workload(bench: Bench, distribution: str, mean: float, *, requests: int | None = None) -> Requests:
    return draw(
        distribution,
        requests=requests or bench.settings.serving.requests,
        mean=mean,
        prompt_lengths=bench.settings.serving.prompts,
        vocabulary=bench.model.config.vocab_size,
        seed=bench.settings.seed,
    )


# -- systems -------------------------------------------------------------------------------------------


def make_systems(bench: Bench) -> dict[str, tuple[Any, Serve]]:
    """Name -> a model, and how it serves a workload."""
    plain = bench.entrant(stock.Stock()).model
    systems: dict[str, tuple[Any, Serve]] = {PADDED: (plain, one_padded_batch), CONTINUOUS: (plain, continuous)}
    for setup in (accel.EXACT, accel.INT8, accel.INT4, accel.INT8_KV):
        systems[setup.name] = (agreeing(bench, bench.entrant(setup)).model, accelerated)
    return systems


def agreeing(bench: Bench, entrant: Entrant) -> Entrant:
    """The entrant, after its generate_batch was held against its generate(); that warms it up as well."""
    agree(entrant.setup.name, entrant.model, workload(bench, "fixed", SEARCH_TOKENS, requests=3))
    return entrant


def make_note(bench: Bench, systems: dict[str, tuple[Any, Serve]], main: Requests) -> str:
    """Stock's generate_batch gets its settings on the way."""
    plain, _ = systems[CONTINUOUS]
    short = main.first(len(main.prompts), most_new=SEARCH_TOKENS)
    batch_tokens, running = best_settings(plain, short, bench.settings.serving.choices)
    systems[CONTINUOUS] = plain, partial(continuous_with, batch_tokens, running)
    rounds = f"Rounds: {bench.settings.serving.rounds}."
    return f"{NOTE.format(batch_tokens=batch_tokens, running=running or 'all')} {rounds}"


def continuous_with(batch_tokens: int, running: int | None, model: Any, workload: Requests) -> Served:
    return continuous(model, workload, stock_settings(workload, batch_tokens=batch_tokens, running=running))


def serve(bench: Bench, systems: Mapping[str, tuple[Any, Serve]], workload: Requests) -> Results:
    print(f"  {len(workload.prompts)} requests, {workload.name}", flush=True)
    candidates = {name: partial(run, *system, workload) for name, system in systems.items()}
    return take_turns(candidates, rounds=bench.settings.serving.rounds, warm_up=False)


def run(model: Any, serve: Serve, workload: Requests) -> Served:
    return serve(model, workload).checked(workload)


# -- tables --------------------------------------------------------------------------------------------


def table(workload: Requests, results: Results, note: str) -> Table:
    longest, prompt = max(workload.lengths), sum(map(len, workload.prompts))
    title = (
        f"{len(workload.prompts)} requests, output lengths {workload.name} (longest {longest}), "
        f"{prompt} tokens of prompts"
    )
    return Table(title, [row(name, workload, results) for name in results], note)


def row(name: str, workload: Requests, results: Results) -> Row:
    return {
        "system": name,
        "ratio": ratio(results, PADDED, name),
        "generate_batch_ratio": ratio(results, CONTINUOUS, name),
        "useful_tokens_per_second": workload.useful / statistics.median(served.seconds for served in results[name]),
        "serve_seconds": statistics.median(served.seconds for served in results[name]),
        "waste_share": 1 - workload.needed / computed(name, workload, results[name][0]),
    }


def ratio(results: Results, baseline: str, name: str) -> float:
    return median_ratio([s.seconds for s in results[baseline]], [s.seconds for s in results[name]])


def computed(name: str, workload: Requests, served: Served) -> int:
    """Tokens that went through the model: stock's generate_batch pads none, ours counts them."""
    if name == PADDED:
        return workload.padded
    return int(served.statistics.get("computed_tokens", workload.needed))


def trend(workloads: Sequence[Requests], runs: Mapping[str, Results]) -> Table:
    """What the spread of the lengths does to the ratio."""
    ours = accel.INT8.name
    rows = [
        {
            "output_lengths": one.name,
            "variation": round(one.variation, 2),
            "mean": round(one.useful / len(one.lengths), 1),
            "longest": max(one.lengths),
            "ratio": ratio(runs[one.name], PADDED, ours),
            "generate_batch_ratio": ratio(runs[one.name], CONTINUOUS, ours),
            "padded_waste_share": 1 - one.needed / one.padded,
        }
        for one in workloads
    ]
    note = f"{ours} against stock's padded batch and stock's generate_batch. Variation: deviation over mean."
    return Table(f"{len(workloads[0].prompts)} requests, by the distribution of their output lengths", rows, note)
