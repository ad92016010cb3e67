"""The ladder's last steps, which need the engine: speculation for one request, continuous batching for many."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from hf_accel.cli.measurement import Requests, accelerated, take_turns

from ..harness.bench import Bench
from ..harness.requests import Serve, in_turn
from ..harness.tables import Row, Table
from ..setups import accel
from .batching import agreeing, workload
from .speculation import continuation, decode, oracle

ACCEPTANCE = 0.8
NOTE = (
    "Pairs: each second row over the first. They are alternatives and no factors of the ladder, as speculation "
    "pays for few requests and batching needs many. Speculation: one request, seconds per token after the first, by "
    "drafts whose tokens are right with probability {acceptance} and cost nothing (an oracle; see drafters for real "
    "ones). Batching: seconds of all requests over all their useful tokens, prompts included; the first {alone} alone."
)


def measure(bench: Bench) -> Table:
    model = agreeing(bench, bench.entrant(accel.INT8)).model
    single, known = continuation(bench, bench.entrant(accel.INT8), 1)
    config = oracle(bench, known, acceptance=ACCEPTANCE, count="auto")
    mean = bench.settings.serving.means[len(bench.settings.serving.means) // 2]
    many = workload(bench, "exponential", mean)
    few = many.first(max(1, len(many.prompts) // 4))
    steps = single.useful - 1
    candidates = {
        "one request": lambda: decode(model, single, None).seconds / steps,
        "one request, speculation": lambda: decode(model, single, config).seconds / steps,
        f"{len(many.prompts)} requests, one by one": partial(per_token, in_turn, model, few),
        f"{len(many.prompts)} requests, continuous batching": partial(per_token, accelerated, model, many),
    }
    seconds = take_turns(candidates, rounds=bench.settings.oracle.rounds, warm_up=False)
    note = NOTE.format(acceptance=ACCEPTANCE, alone=len(few.prompts))
    return Table(f"on top of {accel.INT8.name}", rows({n: statistics.median(s) for n, s in seconds.items()}), note)


def per_token(serve: Serve, model: Any, workload: Requests) -> float:
    return serve(model, workload).checked(workload).seconds / workload.useful


def rows(seconds: dict[str, float]) -> list[Row]:
    """In pairs: before, after."""
    values = list(seconds.values())
    return [
        {"measure": name, "factor_ratio": values[at - at % 2] / value, "token_seconds": value}
        for at, (name, value) in enumerate(seconds.items())
    ]
