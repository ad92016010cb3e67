"""Tokens per second on a model that no cache holds: random weights, ten times the L3 cache.

python examples/speed.py
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from quality import cache_bytes, weight_bytes
from table import table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_accel
from hf_accel.hardware import detect

VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "weights=None": {"weights": None},
    "int8": {"weights": "int8"},
    "int4, group 128": {"weights": "int4"},
}
TYPICAL_L3 = 32 * 2**20  # where the machine does not tell
PATIENCE = 45  # seconds after which no further round begins


def ten_caches() -> int:
    """Bytes of ten L3 caches: less would measure the cache and not the memory."""
    return 10 * (detect().l3_bytes or TYPICAL_L3)


@dataclass
class Run:
    """One generate(): seconds to the first token, tokens per second after it, bytes of its cache per token."""

    first_token: float
    tokens_per_second: float
    kv_bytes_per_token: float


class Stopwatch(BaseStreamer):
    """Notes when generate hands out the prompt and then each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def large_model(num_bytes: int) -> PreTrainedModel:
    """A Llama in bfloat16 whose decode step reads at least so many bytes, or a fourth of the free memory."""
    free = detect().free_memory
    num_bytes = min(num_bytes, free // 4) if free else num_bytes
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=4,
    )
    head = 2 * config.vocab_size * config.hidden_size
    layer = 2 * config.hidden_size * (2 * config.hidden_size + 2 * 4 * 64 + 3 * config.intermediate_size)
    config.num_hidden_layers = max(1, -(-(num_bytes - head) // layer))
    return random_model(config)


def random_model(config: LlamaConfig) -> PreTrainedModel:
    """Weights from one seeded block, repeated: their values do not matter for speed, and it takes no time."""
    with torch.device("meta"):
        shapes = LlamaForCausalLM(config)
    block = 0.02 * torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    weights = {name: fill(p.shape, block, norm=p.ndim == 1) for name, p in shapes.named_parameters()}
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.bfloat16)


def fill(shape: torch.Size, block: Tensor, *, norm: bool) -> Tensor:
    if norm:
        return torch.ones(shape, dtype=torch.bfloat16)
    repeats = -(-shape.numel() // block.numel())
    return block.bfloat16().repeat(repeats)[: shape.numel()].view(shape)


def speed_table(model: PreTrainedModel, *, num_prompt: int = 128, num_new: int = 33, rounds: int = 4) -> str:
    """Medians of each variant on the same weights."""
    models = {name: twin(model, name, keywords) for name, keywords in VARIANTS.items()}
    prompt = torch.randint(model.config.vocab_size, (1, num_prompt), generator=torch.Generator().manual_seed(0))
    runs = take_turns(models, prompt, num_new, rounds)
    return table(
        ["", "first token", "tokens/s", "ratio", "weights", "KV per token"],
        [row(name, runs, weight_bytes(model, VARIANTS[name])) for name in models],
    )


def take_turns(models: dict[str, PreTrainedModel], prompt: Tensor, num_new: int, rounds: int) -> dict[str, list[Run]]:
    """One variant after the other, again and again: a slow moment of the machine must not hit one of them alone."""
    print("  warming up ...", flush=True)
    for model in models.values():
        generate(model, prompt, 2)
    runs: dict[str, list[Run]] = {name: [] for name in models}
    end = time.perf_counter() + PATIENCE
    for number in range(rounds):
        if number and time.perf_counter() > end:
            break
        print(f"  round {number + 1} of {rounds} ...", flush=True)
        for name, model in models.items():
            runs[name].append(generate(model, prompt, num_new))
    return runs


def twin(model: PreTrainedModel, name: str, keywords: dict[str, Any] | None) -> PreTrainedModel:
    """A second model over the same Parameters. patch() touches only the instance it is given."""
    print(f"  {name} ...", flush=True)
    copied = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    # keep_original: the Parameters belong to the other models too, so this one must not free them
    return copied if keywords is None else hf_accel.patch(copied, **keywords, keep_original=True)


def generate(model: PreTrainedModel, prompt: Tensor, num_new: int) -> Run:
    stopwatch = Stopwatch()
    length = {"max_new_tokens": num_new, "min_new_tokens": num_new}
    options = {"do_sample": False, "return_dict_in_generate": True, "streamer": stopwatch}
    cache = model.generate(prompt, attention_mask=torch.ones_like(prompt), **length, **options).past_key_values
    start, first, *_, last = stopwatch.times  # start: when the prompt is handed out
    return Run(first - start, (num_new - 1) / (last - first), cache_bytes(cache) / cache.get_seq_length())


def row(name: str, runs: dict[str, list[Run]], weights: int) -> list[str]:
    ratios = [
        ours.tokens_per_second / stock.tokens_per_second for ours, stock in zip(runs[name], runs["stock"], strict=True)
    ]
    return [
        name,
        f"{1e3 * statistics.median(run.first_token for run in runs[name]):,.0f} ms",
        f"{statistics.median(run.tokens_per_second for run in runs[name]):,.1f}",
        f"{statistics.median(ratios):.2f}x",
        f"{weights / 1e6:,.1f} MB",
        f"{runs[name][0].kv_bytes_per_token:,.0f} B",
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, help="of the model; default: ten times the L3 cache")
    args = parser.parse_args(argv)
    print(speed_table(large_model(args.megabytes * 10**6 if args.megabytes else ten_caches())))


if __name__ == "__main__":
    main()
