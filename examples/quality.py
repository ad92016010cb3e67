"""What smaller weights and a smaller cache cost in perplexity, on a model and a text.

python examples/quality.py
python examples/quality.py --model PATH_OR_ID --text FILE
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from table import table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

import hf_accel

SHIPPED = Path(__file__).parent / "stdlib-tiny"
WINDOW = 512  # tokens that are predicted from one another

# What is compared: the keywords of hf_accel.patch, None for the model as transformers runs it.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "weights=None": {"weights": None},
    "int8": {"weights": "int8"},
    "int4, group 128": {"weights": "int4"},
    "int8, int8 KV": {"weights": "int8", "cache": hf_accel.CacheConfig(dtype="int8")},
}


def quality_table(model: PreTrainedModel, windows: Tensor) -> str:
    """Perplexity and bytes of each variant; windows [n, length] are token ids."""
    rows: list[list[str]] = []
    base = math.nan
    for name, keywords in VARIANTS.items():
        print(f"  {name} ...", flush=True)
        try:
            perplexity, kv_bytes = measure(model, windows, keywords)
        except hf_accel.UnsupportedError as error:
            print(f"  {name}: {error}")
            continue
        base = perplexity if keywords is None else base
        change = "" if keywords is None else f"{100 * (perplexity / base - 1):+.2f} %"
        weights = f"{weight_bytes(model, keywords) / 1e6:,.2f} MB"
        rows.append([name, f"{perplexity:.4f}", change, weights, f"{kv_bytes / windows.numel():,.0f} B"])
    return table(["", "perplexity", "change", "weights", "KV per token"], rows)


def measure(model: PreTrainedModel, windows: Tensor, keywords: dict[str, Any] | None) -> tuple[float, int]:
    """Perplexity of the windows, and the bytes of keys and values that they took."""
    with variant(model, keywords):
        losses, kv_bytes = zip(*score(model, windows, lambda: new_cache(model, keywords)), strict=True)
    return math.exp(sum(losses) / len(losses)), sum(kv_bytes)


def variant(model: PreTrainedModel, keywords: dict[str, Any] | None) -> AbstractContextManager[PreTrainedModel]:
    """The model, patched for the length of a `with` block."""
    return nullcontext(model) if keywords is None else hf_accel.patched(model, **keywords)


def new_cache(model: PreTrainedModel, keywords: dict[str, Any] | None) -> Any:
    if keywords is None:
        return DynamicCache(config=model.config)
    return hf_accel.PagedCache(model.config, keywords.get("cache"))


@torch.no_grad()
def score(model: PreTrainedModel, windows: Tensor, new_cache: Callable[[], Any]) -> Iterator[tuple[float, int]]:
    """Mean loss in nats and cache bytes of each window. What attention reads has been through the cache."""
    for ids in windows.split(1):
        cache = new_cache()
        loss = model(input_ids=ids, labels=ids, past_key_values=cache).loss
        yield loss.item(), cache_bytes(cache)


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values in a cache of transformers or of hf_accel."""
    if isinstance(cache, hf_accel.PagedCache):
        return int(cache.statistics()["kv_bytes"])
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def weight_bytes(model: PreTrainedModel, keywords: dict[str, Any] | None) -> int:
    """Read from the plan, which is there before anything is changed."""
    plan = hf_accel.plan(model, **(keywords or {"weights": None}))
    return int(plan.to_dict()["weight_bytes"]["after"])


def read_windows(tokenizer: Any, text: str, num_tokens: int) -> Tensor:
    """The first tokens of a text, cut into windows [n, WINDOW]."""
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0, :num_tokens]
    length = min(WINDOW, len(ids))
    return ids[: len(ids) // length * length].view(-1, length)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHIPPED))
    parser.add_argument("--text", type=Path, default=SHIPPED / "heldout.txt")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    print(quality_table(model, read_windows(tokenizer, args.text.read_text(encoding="utf-8"), args.tokens)))


if __name__ == "__main__":
    main()
