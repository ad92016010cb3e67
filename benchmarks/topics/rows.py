"""What more rows cost: w tokens in one pass against one, for each width of weights, as when drafts are verified."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_accel.cli.measurement import take_turns

from ..harness.bench import Bench, Entrant
from ..harness.tables import Row, Table
from ..setups import accel, stock

SHAPES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")
PASSES = 3  # over all layers, of each width in each round


def measure(bench: Bench) -> list[Table]:
    entrants = [bench.entrant(s) for s in (stock.Stock(), accel.EXACT, accel.INT8, accel.INT4) if takes_part(bench, s)]
    tables = [table(bench, "one pass of the model", {e.setup.name: partial(time_step, bench, e) for e in entrants})]
    for suffix in (*SHAPES, "lm_head"):
        linears = {entrant.setup.name: linears_of(entrant, suffix) for entrant in entrants}
        first = linears[entrants[0].setup.name][0]
        runs = {name: partial(time_linears, modules) for name, modules in linears.items()}
        tables.append(table(bench, f"{suffix} [{first.out_features} x {first.in_features}]", runs))
    return tables


def takes_part(bench: Bench, setup: accel.Setup) -> bool:
    return setup.name in [s.name for s in bench.setups]


def table(bench: Bench, what: str, runs: Mapping[str, Callable[[int], float]]) -> Table:
    print(f"  {what}", flush=True)
    candidates = {(name, width): partial(run, width) for name, run in runs.items() for width in bench.settings.widths}
    seconds = take_turns(candidates, rounds=bench.settings.rounds)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    stock_seconds = medians[next(iter(runs)), 1]
    rows = [row(name, medians, stock_seconds, bench.settings.widths) for name in runs]
    note = "Seconds of one row, its ratio to stock's; then how many times longer w rows take than one."
    return Table(f"v(w), {what}", rows, note)


def row(name: str, medians: dict[tuple[str, int], float], stock_seconds: float, widths: Sequence[int]) -> Row:
    one = medians[name, 1]
    times = {f"{width}_rows_ratio": medians[name, width] / one for width in widths if width > 1}
    return {"setup": name, "ratio": stock_seconds / one, "one_row_seconds": one, **times}


def linears_of(entrant: Entrant, suffix: str) -> list[Any]:
    """One of each layer, so that none finds its weights in a cache; two of k_proj and v_proj, which are small."""
    suffixes = (suffix, suffix.replace("k_proj", "v_proj"))
    return [module for name, module in entrant.model.named_modules() if name.endswith(suffixes)]


@torch.no_grad()
def time_linears(linears: Sequence[nn.Linear], width: int) -> float:
    """Seconds of one."""
    x = torch.randn(width, linears[0].in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    best = min(time_pass(linears, x) for _ in range(PASSES))
    return best / len(linears)


def time_pass(linears: Sequence[nn.Linear], x: Tensor) -> float:
    start = time.perf_counter()
    for linear in linears:
        linear(x)
    return time.perf_counter() - start


@torch.no_grad()
def time_step(bench: Bench, entrant: Entrant, width: int) -> float:
    """`width` tokens of one sequence with logits for each, after the context; the second of two passes."""
    cache = entrant.setup.filled_cache(
        entrant.model, batch=1, tokens=bench.settings.context, room=width, seed=bench.settings.seed
    )
    ids = bench.tokens(batch=1, length=width)
    for _ in range(2):
        start = time.perf_counter()
        entrant.model(input_ids=ids, past_key_values=cache, use_cache=True)
        seconds = time.perf_counter() - start
        cache.crop(-width)
    return seconds
