"""Prefill: a prompt through the model into an empty cache, up to the first token's logits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from hf_accel.cli.measurement import BASELINE, finish, take_turns

from ..harness.bench import Bench, Entrant
from ..harness.requests import median_ratio, spread_share
from ..harness.tables import Row, Table

NOTE = (
    "Peak share: of what torch's own matrix product was measured to reach here, in INT8 (oneDNN) where a setup "
    "multiplies integers, else in the model's dtype; attention's products are not counted."
)


def measure(bench: Bench) -> list[Table]:
    return [table(bench, bench.entrants)]


def table(bench: Bench, entrants: Mapping[str, Entrant]) -> Table:
    candidates = {
        name: partial(run_prefill, bench, entrant, tokens=length(bench)) for name, entrant in entrants.items()
    }
    seconds = take_turns(candidates, rounds=bench.settings.rounds)
    rows = [row(bench, entrants[name], seconds) for name in seconds]
    return Table(f"prefill of {length(bench)} tokens, batch 1", rows, NOTE)


def length(bench: Bench) -> int:
    """Tokens of the prompt."""
    return bench.settings.prompt or bench.settings.context


def row(bench: Bench, entrant: Entrant, seconds: dict[str, list[float]]) -> Row:
    values = seconds[entrant.setup.name]
    median = statistics.median(values)
    peak = bench.peak(entrant.setup.multiplies)
    return {
        "setup": entrant.setup.name,
        "ratio": median_ratio(seconds[BASELINE], values),
        "prefill_seconds": median,
        "spread_share": spread_share(values),
        "tokens_per_second": length(bench) / median,
        "peak_share": None if peak is None else operations(bench) / median / peak,
    }


@torch.no_grad()
def run_prefill(bench: Bench, entrant: Entrant, *, tokens: int) -> float:
    prompt = bench.tokens(batch=1, length=tokens)
    cache = entrant.setup.new_cache(entrant.model, batch=1, tokens=tokens)
    finish(bench.settings.device)
    start = time.perf_counter()
    entrant.model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    finish(bench.settings.device)
    return time.perf_counter() - start


def operations(bench: Bench) -> int:
    """Two per weight and token; the head sees the last token alone."""
    head = bench.model.get_output_embeddings()
    linears = [module for module in bench.model.modules() if isinstance(module, nn.Linear) and module is not head]
    return 2 * (length(bench) * sum(linear.weight.numel() for linear in linears) + head.weight.numel())
