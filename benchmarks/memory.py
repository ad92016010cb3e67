"""Memory: weights, keys and values, patch() itself, and attention over long prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import hf_accel

from .bench import Bench
from .models import twin
from .settings import Settings
from .tables import Row, Table
from .timing import BASELINE

PATCHED_WEIGHTS = ("int8", "int4")
PAGED_CACHES = {"paged": "auto", "paged int8": "int8"}
ATTENTION_HEADS = 4  # enough to see the growth; all heads of a model would take several GB without tiling


def measure(bench: Bench) -> list[Table]:
    return [weights_table(bench), kv_table(bench), patch_table(bench.settings), attention_table(bench)]


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
    held = dict(kv_bytes(bench, mask))
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


# -- in processes of their own -------------------------------------------------------------------------


def patch_table(settings: Settings) -> Table:
    rows: list[Row] = []
    for weights in PATCHED_WEIGHTS:
        print(f"    patch to {weights} in a new process", flush=True)
        sizes = call("patch_peak", settings.model, settings.layers or 0, weights)
        peak = sizes["patch_peak_bytes"]
        highest = None if peak is None else (sizes["model_bytes"] + peak) / sizes["model_bytes"]
        rows.append({"weights": weights, "peak_to_model_ratio": highest, **sizes})
    return Table("patch(keep_original=False)", rows, "The peak is what patch() adds to the memory that it found.")


def attention_table(bench: Bench) -> Table:
    config, lengths = bench.model.config, bench.settings.attention_lengths
    print("    attention in a new process", flush=True)
    heads = min(ATTENTION_HEADS, config.num_attention_heads)
    kv_heads = max(1, heads * config.num_key_value_heads // config.num_attention_heads)
    head_dim = config.hidden_size // config.num_attention_heads
    peaks = call("attention_peak", heads, kv_heads, head_dim, *lengths)
    rows = [
        {"attention": name, **{f"{length}_bytes": peak for length, peak in zip(lengths, values, strict=True)}}
        for name, values in peaks.items()
    ]
    title = f"scratch memory of attention, {heads} heads of one layer, by tokens of the prompt"
    return Table(title, rows, "Peak above the memory before, the result included.")


def call(module: str, *arguments: object) -> Any:
    """The JSON that `python -m benchmarks.<module>` prints last."""
    command = [sys.executable, "-m", f"{__package__}.{module}", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
