"""Memory: weights, keys and values, and attention over long prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import hf_accel
from hf_accel.cli.measurement import BASELINE
from hf_accel.patching.twin import twin

from ..harness.bench import Bench
from ..harness.processes import call
from ..harness.tables import Row, Table

PAGED_CACHES = {"paged": "auto", "paged int8": "int8"}
ATTENTION_HEADS = 4  # enough to see the growth; all heads of a model would take several GB without tiling
NOTE = "Peak above the memory before; keys and values, and what else grows with the prompt, included."


def measure(bench: Bench) -> list[Table]:
    """The memory of attention is the host's, which a process of its own measures."""
    attention = attention_tables(bench) if bench.settings.device == "cpu" else []
    return [weights_table(bench), kv_table(bench), *attention]


def weights_table(bench: Bench) -> Table:
    held = {name: entrant.setup.weight_bytes(entrant.model) for name, entrant in bench.entrants.items()}
    rows = [{"setup": n, "ratio": held[BASELINE] / size, "weight_bytes": size} for n, size in held.items()]
    return Table("weights", rows)


# -- keys and values -----------------------------------------------------------------------------------


def kv_table(bench: Bench) -> Table:
    """A ragged batch, padded on the left as for generate()."""
    longest = max(4, bench.settings.context // 4)
    lengths = [int(longest * share) for share in (1, 0.7, 0.5, 0.3)]
    mask = torch.stack([torch.arange(longest) >= longest - length for length in lengths]).long()
    held = dict(kv_bytes(bench, mask.to(bench.settings.device)))
    stock = held[BASELINE]
    rows = [
        {"cache": name, "ratio": stock / size, "kv_bytes": size, "per_token_bytes": size / sum(lengths)}
        for name, size in held.items()
    ]
    return Table(f"keys and values of prompts of {', '.join(map(str, lengths))} tokens in one batch", rows)


def kv_bytes(bench: Bench, mask: Tensor) -> Iterator[tuple[str, int]]:
    ids = bench.tokens(batch=mask.shape[0], length=mask.shape[1])
    stock: Any = DynamicCache(config=bench.model.config)
    run(bench.model, ids, mask, stock)
    yield BASELINE, sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
    with hf_accel.patched(twin(bench.model), weights=None) as model:
        for name, dtype in PAGED_CACHES.items():
            paged = hf_accel.PagedCache(model.config, dtype=dtype)
            run(model, ids, mask, paged)
            yield name, int(paged.statistics()["kv_bytes"])


@torch.no_grad()
def run(model: Any, ids: Tensor, mask: Tensor, cache: Any) -> None:
    model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)


# -- in a process of its own ---------------------------------------------------------------------------


def attention_tables(bench: Bench) -> list[Table]:
    config, lengths = bench.model.config, bench.settings.attention_lengths
    print("    attention in a new process", flush=True)
    heads = min(ATTENTION_HEADS, config.num_attention_heads)
    kv_heads = max(1, heads * config.num_key_value_heads // config.num_attention_heads)
    head_dim = config.hidden_size // config.num_attention_heads
    found = call("attention_peak", heads, kv_heads, head_dim, *lengths)
    peaks = [
        {"attention": name, "growth_exponent": growth(lengths, values["bytes"]), **by_length(lengths, values, "bytes")}
        for name, values in found.items()
    ]
    seconds = [{"attention": name, **by_length(lengths, values, "seconds")} for name, values in found.items()]
    what = f"one layer with {heads} heads, by tokens of the prompt"
    return [
        Table(f"scratch memory of {what}", peaks, NOTE),
        Table(f"time of {what}", seconds, "One pass each, in turns."),
    ]


def by_length(lengths: Sequence[int], values: dict[str, list[float]], what: str) -> Row:
    return {f"{length}_{what}": value for length, value in zip(lengths, values[what], strict=True)}


def growth(lengths: Sequence[int], peaks: Sequence[float | None]) -> float | None:
    """Of the peaks from one length to the next, over all: 1 is linear, 2 quadratic."""
    known = [(length, peak) for length, peak in zip(lengths, peaks, strict=True) if peak]
    if len(known) < 2:
        return None
    (short, low), (long, high) = known[0], known[-1]
    return math.log(high / low) / math.log(long / short)
