"""Prefill: a prompt through the model into an empty cache, up to the first token's logits."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch

from .bench import Bench, Entrant
from .tables import Table
from .timing import BASELINE, median_ratio, take_turns


def measure(bench: Bench) -> list[Table]:
    candidates = {name: partial(run_prefill, bench, entrant) for name, entrant in bench.entrants.items()}
    seconds = take_turns(candidates, rounds=bench.settings.rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        {
            "setup": name,
            "ratio": median_ratio(seconds[BASELINE], values),
            "prefill_seconds": medians[name],
            "tokens_per_second": bench.settings.context / medians[name],
        }
        for name, values in seconds.items()
    ]
    return [Table(f"prefill of {bench.settings.context} tokens, batch 1", rows)]


@torch.no_grad()
def run_prefill(bench: Bench, entrant: Entrant) -> float:
    prompt = bench.tokens(batch=1, length=bench.settings.context)
    cache = entrant.setup.new_cache(entrant.model)
    start = time.perf_counter()
    entrant.model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start
