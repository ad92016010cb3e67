"""Whole models, patched and not, over shapes, dtypes, weights, batches and prompts: is anything slower than stock?"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTModel,
)

import hf_accel
from hf_accel.cli.measurement import BASELINE, take_turns
from hf_accel.patching.twin import twin

from ..harness.bench import Bench, Entrant
from ..harness.models import reload
from ..harness.requests import median_ratio, spread_share
from ..harness.tables import Row, Table
from ..setups import accel, stock
from .decode import run_one
from .isa import FLOAT32
from .prefill import run_prefill

LEAST_RATIO = 0.97  # what measures as less is slower than stock
# A stock that took so many times what the other took with fewer rows is not timed with more.
HOPELESS = 3.0
OURS = {"exact": accel.EXACT, "int8": accel.INT8, "int4": accel.INT4, "auto": accel.AUTO}
NOTE = (
    "Ratio: seconds of the faster stock, in the model's dtype or in float32, over ours in the same round, the median. "
    "Least ratio: the fewest seconds of either. Stock seconds are the median, and the spread is the widest of all."
)
SUMMARY_NOTE = (
    "Rows: decode steps by batch and prompts by length, or numbers of images. Slower: those whose ratio is below "
    f"{LEAST_RATIO}; surely slower: those whose least ratio is so too. patch() without weights= takes int8."
)
Run = Callable[[Entrant], float]
TOWERS: dict[str, Callable[[], Any]] = {
    "ViT base": lambda: ViTModel(ViTConfig(), add_pooling_layer=False),
    "CLIP base": lambda: CLIPVisionModel(CLIPVisionConfig()),
    "SigLIP base": lambda: SiglipVisionModel(SiglipVisionConfig(vision_use_head=False)),
    "DINOv2 base": lambda: Dinov2Model(Dinov2Config()),
}


def measure(bench: Bench) -> list[Table]:
    settings = bench.settings.never_slower
    tables = {f"{model}, {dtype}": case_table(bench, model, dtype) for model, dtype in settings.cases}
    tables |= {f"{name}, float32": tower_table(bench, name) for name in settings.towers}
    return [summary(tables), *tables.values()]


def case_table(bench: Bench, model: str, dtype: str) -> Table:
    gc.collect()  # the models before: they point to themselves, and several are large
    settings = bench.settings.never_slower
    lengths = {"context": settings.context, "batch_tokens": settings.tokens}
    own = Bench(replace(bench.settings, model=model, dtype=dtype, layers=None, **lengths))
    stocks = {BASELINE: own.entrant(stock.Stock())}
    if dtype != "float32":
        stocks[FLOAT32] = Entrant(stock.Stock(), reload(own.model, dtype=torch.float32), 0.0, {})
    ours = {label: own.entrant(setup) for label, setup in OURS.items()}
    decode: dict[str, Run] = {f"decode, batch {batch}": partial(decode_step, own, batch) for batch in settings.batches}
    prefill: dict[str, Run] = {
        f"prefill of {tokens}": partial(prefill_seconds, own, tokens) for tokens in settings.prompts
    }
    # no warm-up of decoding: the first step of each generate() is not counted
    rows = rows_of(own, decode, stocks, ours, warm_up=False) + rows_of(own, prefill, stocks, ours, warm_up=True)
    return Table(f"{model}, {dtype}", rows, NOTE)


def tower_table(bench: Bench, name: str) -> Table:
    gc.collect()
    settings = bench.settings.never_slower
    own = Bench(replace(bench.settings, model=name, dtype="float32", layers=None))
    torch.manual_seed(own.settings.seed)
    model = TOWERS[name]().eval()
    stocks = {BASELINE: Entrant(stock.Stock(), model, 0.0, {})}
    patched = {label: hf_accel.patch(twin(model), weights=OURS[label].weights, keep_original=True) for label in OURS}
    ours = {label: Entrant(OURS[label], each, 0.0, {}) for label, each in patched.items()}
    runs: dict[str, Run] = {f"images: {images}": partial(tower_seconds, images) for images in settings.images}
    return Table(f"{name}, float32", rows_of(own, runs, stocks, ours, warm_up=True), NOTE)


@torch.inference_mode()
def tower_seconds(images: int, entrant: Entrant) -> float:
    config: Any = entrant.model.config
    pixels = torch.randn(images, config.num_channels, config.image_size, config.image_size)
    start = time.perf_counter()
    entrant.model(pixel_values=pixels)
    return time.perf_counter() - start


def decode_step(bench: Bench, batch: int, entrant: Entrant) -> float:
    return run_one(bench, entrant, batch=batch, context=bench.settings.context).per_step


def prefill_seconds(bench: Bench, tokens: int, entrant: Entrant) -> float:
    return run_prefill(bench, entrant, tokens=tokens)


def rows_of(
    bench: Bench, runs: Mapping[str, Run], stocks: Mapping[str, Entrant], ours: Mapping[str, Entrant], *,
    warm_up: bool,
) -> list[Row]:  # fmt: skip
    """A row for each of `runs`, which come in the order of their rows of activations."""
    rows, hopeful = [], dict(stocks)
    for work, run in runs.items():
        print(f"  {bench.description}, {bench.settings.dtype}: {work}", flush=True)
        entrants = hopeful | ours
        candidates = {n: partial(turn, run, e, bench.settings.never_slower.turn) for n, e in entrants.items()}
        seconds = take_turns(candidates, rounds=bench.settings.rounds, warm_up=warm_up)
        rows.append(row(work, {n: seconds[n] for n in hopeful}, {n: seconds[n] for n in ours}))
        print(f"    {rows[-1]}", flush=True)
        most = HOPELESS * min(min(seconds[name]) for name in hopeful)
        hopeful = {name: entrant for name, entrant in hopeful.items() if min(seconds[name]) <= most}
    return rows


def turn(run: Run, entrant: Entrant, least: float) -> float:
    """The median of as many runs as take `least` seconds together."""
    end, seconds = time.perf_counter() + least, [run(entrant)]
    while time.perf_counter() < end:
        seconds.append(run(entrant))
    return statistics.median(seconds)


def row(work: str, stocks: Mapping[str, Sequence[float]], ours: Mapping[str, Sequence[float]]) -> Row:
    faster = min(stocks, key=lambda name: statistics.median(stocks[name]))
    found: Row = {"work": work, "faster": faster, "stock_seconds": statistics.median(stocks[faster])}
    for label, seconds in ours.items():
        found[f"{label}_ratio"] = min(median_ratio(each, seconds) for each in stocks.values())
        found[f"{label}_least_ratio"] = min(map(min, stocks.values())) / min(seconds)
    return {**found, "spread_share": max(map(spread_share, [*stocks.values(), *ours.values()]))}


def summary(tables: Mapping[str, Table]) -> Table:
    rows = [summary_row(name, label, table.rows) for name, table in tables.items() for label in OURS]
    return Table("the slowest of each model and weights", rows, SUMMARY_NOTE)


def summary_row(model: str, label: str, rows: Sequence[Row]) -> Row:
    slowest = min(rows, key=lambda row: float(row[f"{label}_ratio"]))
    slower = [row for row in rows if row[f"{label}_ratio"] < LEAST_RATIO]
    return {
        "model": f"{model}, {label}",
        "lowest_ratio": slowest[f"{label}_ratio"],
        "lowest_least_ratio": min(row[f"{label}_least_ratio"] for row in rows),
        "slowest": slowest["work"],
        "rows": len(rows),
        "slower": len(slower),
        "surely_slower": sum(row[f"{label}_least_ratio"] < LEAST_RATIO for row in slower),
    }
