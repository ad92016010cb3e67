"""Experts of mixtures: ours in INT8 and INT4 against transformers' own in bfloat16, by number of tokens."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import hf_accel
from hf_accel.cli.measurement import take_turns
from hf_accel.patching.twin import twin

from ..harness.bench import Bench
from ..harness.tables import Row, Table


@dataclass(frozen=True)
class Shape:
    """top_k: experts that a token takes. inner: the intermediate size."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    layers: int


SHAPES = (Shape(8, 2, 1024, 1024, 4), Shape(64, 8, 1024, 512, 2))  # more than a cache holds in every format
TOKENS = (1, 4, 16, 64)
PASSES = 2  # over all layers, in each round
GROUP = 128
OWN = ("grouped_mm", "batched_mm")  # transformers' forwards
SMALL = {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
NOTE = (
    "Seconds of one layer's experts. The ratios are those of the faster of transformers' two forwards to ours: "
    "how many times faster ours are. Tokens choose at random, and otherwise in each layer and pass."
)


def measure(bench: Bench) -> list[Table]:
    return [table(bench, shape) for shape in SHAPES]


@torch.inference_mode()
def table(bench: Bench, shape: Shape) -> Table:
    title = f"{shape.top_k} of {shape.experts} experts, {shape.hidden} x {shape.inner}, {shape.layers} layers"
    print(f"  {title}", flush=True)
    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.inner, "moe_intermediate_size": shape.inner}
    counts = {"num_experts": shape.experts, "num_experts_per_tok": shape.top_k, "num_hidden_layers": shape.layers}
    config = Qwen3MoeConfig(**SMALL, **sizes, **counts)
    torch.manual_seed(bench.settings.seed)
    with torch.inference_mode(False):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
        ways = {way: stock(model, way) for way in OWN}
        for bits in (8, 4):
            weights = {"bits": bits} | ({"group_size": GROUP} if bits == 4 else {})
            patched: Any = hf_accel.patch(twin(model), weights=weights, keep_original=True)
            ways[f"int{bits}"] = modules_of(patched)
    rows = [row(bench, ways, shape, tokens) for tokens in TOKENS]
    return Table(title, rows, NOTE)


def stock(model: Any, way: str) -> list[Any]:
    """The experts of a model, over the same weights, with one of transformers' forwards."""
    config = copy.deepcopy(model.config)
    config._experts_implementation = way
    modules = modules_of(twin(model))
    for module in modules:
        module.config = config
    return modules


def modules_of(model: Any) -> list[Any]:
    return [layer.mlp.experts for layer in model.model.layers]


def row(bench: Bench, ways: dict[str, list[Any]], shape: Shape, tokens: int) -> Row:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
    scores = torch.rand(tokens, shape.top_k, generator=generator).softmax(-1).bfloat16()
    passes = PASSES * len(next(iter(ways.values())))
    chosen = [torch.rand(tokens, shape.experts, generator=generator).topk(shape.top_k).indices for _ in range(passes)]
    run: dict[str, Callable[[], float]] = {way: partial(timed, of, x, chosen, scores) for way, of in ways.items()}
    found = take_turns(run, rounds=bench.settings.rounds)
    seconds = {way: statistics.median(values) for way, values in found.items()}
    best = min(seconds[way] for way in OWN)
    ratios = {f"{way}_ratio": best / value for way, value in seconds.items() if way not in OWN}
    return {"tokens": str(tokens), **ratios, **{f"{way}_seconds": value for way, value in seconds.items()}}


def timed(modules: list[Any], x: Tensor, chosen: list[Tensor], scores: Tensor) -> float:
    """Seconds of one module."""
    start = time.perf_counter()
    for number, index in enumerate(chosen):
        modules[number % len(modules)](x, index, scores)
    return (time.perf_counter() - start) / len(chosen)
