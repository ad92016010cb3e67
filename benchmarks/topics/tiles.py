"""Products by AMX tiles against products by vectors, row by row: from how many rows on are tiles faster, and how fast?

The answer belongs in TILE_ROWS of hf_accel/kernels/cpu/integer_linear.py and float_linear.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from torch import nn

from hf_accel.cli.measurement import take_turns
from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu import isa, refusal, using_isa
from hf_accel.kernels.cpu.float_linear import FloatLinear
from hf_accel.kernels.cpu.integer_linear import IntegerLinear, quantize

from ..harness.bench import Bench
from ..harness.tables import Row, Table
from .rows import time_linears

LEVELS = ("amx",)
SHAPES = ("mlp.gate_proj", "mlp.down_proj")
GROUPS = {"int8": (8, 128), "int4, groups of 32": (4, 32), "int4, groups of 128": (4, 128)}
NEVER = 2**31 - 1  # no call has so many rows
WAYS = {"tiles": 1, "vectors": NEVER}  # the fewest rows that tiles multiply
TORCH = "torch"

Linears = Sequence[IntegerLinear | FloatLinear | nn.Linear]


def measure(bench: Bench) -> list[Table]:
    """No tables on a CPU without tiles."""
    if (level := level_with_tiles()) is None:
        return []
    with using_isa(level):
        return [table(bench, shape, weights, linears) for shape in SHAPES for weights, linears in ways(bench, shape)]


def level_with_tiles() -> str | None:
    if refusal() is not None:
        return None
    for level in LEVELS:
        try:
            with using_isa(level):
                return isa()
        except UnsupportedError:
            continue
    return None


def ways(bench: Bench, shape: str) -> Iterator[tuple[str, dict[str, Linears]]]:
    """The kinds of weights; for each, the same layers multiplied in several ways."""
    layers = [module for name, module in bench.model.named_modules() if name.endswith(shape)]
    for kind, (bits, group) in GROUPS.items():
        found = [quantize(bits, layer.weight.detach(), group) for layer in layers]
        weights = [result[0] for result in found if result is not None]
        yield kind, {way: [IntegerLinear([w], [None], tile_rows=rows) for w in weights] for way, rows in WAYS.items()}
    exact: dict[str, Linears] = {
        way: [FloatLinear([layer.weight], [None], tile_rows=rows) for layer in layers] for way, rows in WAYS.items()
    }
    yield "bf16", exact | {TORCH: layers}


def table(bench: Bench, shape: str, weights: str, linears: dict[str, Linears]) -> Table:
    widths = sorted({*bench.settings.widths, bench.settings.context})
    first = linears["tiles"][0]
    title = f"{shape} [{first.out_features} x {first.in_features}], {weights}"
    print(f"  {title}", flush=True)
    candidates = {(way, n): partial(time_linears, of, n) for way, of in linears.items() for n in widths}  # type: ignore[arg-type]
    seconds = take_turns(candidates, rounds=bench.settings.rounds)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    operations = 2 * first.out_features * first.in_features
    rows = [row(n, {way: medians[way, n] for way in linears}, operations * n) for n in widths]
    faster = next((n for i, n in enumerate(widths) if all(r["ratio"] >= 1 for r in rows[i:])), None)
    note = "Tiles are never faster" if faster is None else f"Tiles are faster from {faster} rows on"
    return Table(title, rows, f"{note}. Seconds of one layer; ratio: vectors' seconds to tiles'; {isa()}.")


def row(width: int, seconds: dict[str, float], operations: int) -> Row:
    times = {f"{way}_seconds": value for way, value in seconds.items()}
    speeds = {f"{way}_giga_operations": operations / value / 1e9 for way, value in seconds.items()}
    return {"rows": str(width), "ratio": seconds["vectors"] / seconds["tiles"], **times, **speeds}
