"""What estimate() said against what was measured: in one run (estimates.json), and of loads (batching, latency).

Loads are estimated from speeds that other topics recorded on the same machine: bandwidth is that of each file, and the
speeds of products are in prefill.json, as the share of them that was reached.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.harness.models import MODELS
from hf_accel.cli.measurement import draw
from hf_accel.estimate import estimate
from hf_accel.estimate.roofline import ByRows, Machine
from hf_accel.estimate.serving_estimate import Load, _Costs, service
from hf_accel.estimate.workload import Workload

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
AVX512 = "amd-epyc-zen-4-avx512_vnni_bf16"
WEIGHTS = {"hf_accel exact": None, "hf_accel int8": "int8", "hf_accel int4": "int4"}
CONTEXT = 512
WITHIN = 0.25


def read(folder: str, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / folder / f"{topic}.json").read_text(encoding="utf-8"))
    return found


def recorded() -> Iterator[Any]:
    """Each row of every machine where estimates were compared."""
    for path in sorted(RESULTS.glob("*/estimates.json")):
        for table in read(path.parent.name, "estimates")["tables"]:
            for row in table["rows"]:
                yield pytest.param(row, id=f"{path.parent.name} {row['work']} {row['setup']}")


@pytest.mark.parametrize("row", list(recorded()))
def test_one_run(row: dict[str, Any]) -> None:
    assert abs(row["estimated_seconds"] / row["measured_seconds"] - 1) <= WITHIN


@cache
def workload(setup: str) -> Workload:
    """Of up to 4096 tokens of one sequence."""
    config = LlamaConfig(**MODELS["bench-1b"], tie_word_embeddings=False, max_position_embeddings=4096)
    found = estimate(config, context=4096, weights=WEIGHTS[setup], dtype=torch.bfloat16, bandwidth=1.0, compute=1.0)
    return found.counted.workload


@cache
def machine(topic: str) -> Machine:
    prefill = {row["setup"]: row for row in read(AVX512, "prefill")["tables"][0]["rows"]}
    tensors = workload("hf_accel exact").tensors
    operations = sum(t.operations_per_token * (1 if t.kind == "head" else CONTEXT) for t in tensors)

    def speed(setup: str) -> float:
        return float(operations / prefill[setup]["prefill_seconds"] / prefill[setup]["peak_share"])

    bandwidth = read(AVX512, topic)["machine"]["read_bytes_per_second"]
    return Machine(bandwidth, speed("stock"), quantized=ByRows((1,), (2 / speed("hf_accel int8"),)))


def all_at_once(setup: str, count: int, mean: int) -> float:
    """Each request's own arithmetic, keys and values, and the weights once for each token of the longest."""
    requests = draw("exponential", requests=count, mean=mean, prompt_lengths=(16, 128), vocabulary=32000, seed=0)
    one, here = workload(setup), machine("batching")
    seconds = max(requests.lengths) * one.weight_bytes_read(count) / here.bandwidth
    for prompt, new in zip(requests.prompts, requests.lengths, strict=True):
        running = one.at(context=len(prompt) + new // 2, batch=1)
        seconds += here.computing(one.at(context=len(prompt), batch=1).prefill)
        seconds += (new - 1) * (here.computing(running.decode) + running.kv_bytes / here.bandwidth)
    return seconds


@pytest.mark.parametrize("setup", WEIGHTS)
def test_requests_that_come_at_once(setup: str) -> None:
    (table,) = [t for t in read(AVX512, "batching")["tables"] if "exponential, mean 32" in t["title"]]
    measured = next(row["serve_seconds"] for row in table["rows"] if row["system"] == setup)
    assert all_at_once(setup, int(table["title"].split()[0]), 32) == pytest.approx(measured, rel=WITHIN)


def latencies() -> list[Any]:
    rows = read(AVX512, "latency")["tables"][0]["rows"]
    wanted = [row for row in rows if row["system"] == "hf_accel int8" and row["budget"] >= 256]
    return [pytest.param(row, id=f"{row['load']} {row['budget']}") for row in wanted]


@pytest.mark.parametrize("row", latencies())
def test_latency_under_a_load(row: dict[str, Any]) -> None:
    """24 requests of 73 and 16 tokens, with passes that take a whole prompt.

    What is estimated is the mean of the seconds between two tokens. Few passes have a prompt, and so the median is
    that of passes without one.
    """
    load = Load(row["useful_tokens_per_second"] / 16, 73, 16)
    here = workload("hf_accel int8"), machine("latency"), load
    found = service(*here, memory=None, longest=None, price_per_hour=None)
    assert found.replicas == 1
    of_prompts = load.requests_per_second * _Costs(*here).prompt
    assert found.seconds_per_token * (1 - of_prompts) == pytest.approx(row["between_p50_seconds"], rel=WITHIN)
    assert found.seconds_to_first_token == pytest.approx(row["first_p50_seconds"], rel=WITHIN)
