"""What adapters of requests cost: requests of different adapters in the same passes, against requests of none."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import hf_accel
from hf_accel.cli.measurement import WrongResultError, take_turns

from ..harness.bench import Bench
from ..harness.requests import median_ratio
from ..harness.settings import Adapters
from ..harness.tables import Row, Table
from ..setups import accel
from .batching import agreeing

NONE, SAME, OTHERS = "none", "one adapter", "adapters of their own"
NOTE = (
    "Whole requests by an Engine, which computes all of them in the same passes. Longer: the time over that of the "
    "same requests without adapters, in turns. With quantized weights, a request's tokens are those that it has alone."
)


def measure(bench: Bench) -> list[Table]:
    wanted = bench.settings.adapters
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(wanted.at_once)]
        for number, path in enumerate(paths):
            save_adapter(path, bench.model, rank=wanted.rank, seed=number)
        rows = [row for setup in (accel.EXACT, accel.INT8, accel.INT4) for row in rows_of(bench, setup, paths)]
    title = (
        f"{wanted.at_once} requests of {wanted.prompt} tokens, {wanted.new_tokens} new ones each, {wanted.loaded} "
        f"adapters of rank {wanted.rank} on all linears loaded"
    )
    return [Table(title, rows, NOTE)]


def save_adapter(folder: Path, model: nn.Module, *, rank: int, seed: int) -> None:
    """Write a LoRA of all linear layers but the head, of random numbers, as PEFT saves it."""
    generator = torch.Generator().manual_seed(seed)
    tensors, names = {}, set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            names.add(name.rpartition(".")[2])
            for part, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                numbers = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = numbers.to(torch.bfloat16)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(names), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")


def rows_of(bench: Bench, setup: Any, paths: list[Path]) -> list[Row]:
    wanted = bench.settings.adapters
    entrant = agreeing(bench, bench.entrant(setup))
    prompts = bench.tokens(batch=wanted.at_once, length=wanted.prompt).tolist()
    with hf_accel.Engine(entrant.model) as engine:
        for number in range(wanted.loaded):
            engine.load_adapter(str(number), paths[number % len(paths)])
        own: list[str | None] = [str(number) for number in range(wanted.at_once)]
        named = {NONE: [None] * len(prompts), SAME: own[:1] * len(prompts), OTHERS: own}
        check(engine, prompts, own, wanted, alone=setup is not accel.EXACT)  # torch rounds many float rows otherwise
        runs = {name: partial(seconds, engine, prompts, each, wanted) for name, each in named.items()}
        print(f"  {setup.name}", flush=True)
        found = take_turns(runs, rounds=bench.settings.rounds)
    return [row(setup.name, name, found) for name in found]


def answers(engine: Any, prompts: list[list[int]], names: list[str | None], wanted: Adapters) -> list[list[int]]:
    length = {"max_new_tokens": wanted.new_tokens, "min_new_tokens": wanted.new_tokens, "temperature": 0}
    requests = [engine.submit(p, adapter=name, **length) for p, name in zip(prompts, names, strict=True)]
    return [request.result().tokens for request in requests]


def seconds(engine: Any, prompts: list[list[int]], names: list[str | None], wanted: Adapters) -> float:
    start = time.perf_counter()
    answers(engine, prompts, names, wanted)
    return time.perf_counter() - start


def check(engine: Any, prompts: list[list[int]], names: list[str | None], wanted: Adapters, *, alone: bool) -> None:
    """Raises WrongResultError if a request gets other tokens next to others than `alone`, or adapters do nothing."""
    together = answers(engine, prompts, names, wanted)
    if alone and answers(engine, prompts[-1:], names[-1:], wanted) != together[-1:]:
        raise WrongResultError("a request has other tokens next to requests of other adapters")
    if answers(engine, prompts, [None] * len(prompts), wanted) == together:
        raise WrongResultError("adapters change no token")


def row(setup: str, name: str, found: Mapping[str, list[float]]) -> Row:
    longer = [own / bare - 1 for own, bare in zip(found[name], found[NONE], strict=True)]
    return {
        "setup": f"{setup}: {name}",
        "longer_percent": 100 * statistics.median(longer),
        "least_percent": 100 * min(longer),
        "most_percent": 100 * max(longer),
        "ratio": median_ratio(found[NONE], found[name]),
        "serve_seconds": statistics.median(found[name]),
    }
