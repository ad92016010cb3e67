"""Runs what it is told, line by line, with the hf_accel that PYTHONPATH names, of whatever commit; see versions.py.

Each line on the standard input is the name of a workload, and each answer a line of JSON: seconds by what was timed.
"""

from __future__ import annotations

import copy
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_accel

SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 2048},
    "large": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "vocab_size": 32000},
}
NEW_TOKENS = {"small": 128, "large": 24}
LONG = {"small": 8192, "large": 2048}  # tokens of context
REQUESTS, MEAN = 32, {"small": 48, "large": 12}
SECONDS_BETWEEN = {"small": 0.004, "large": 0.05}  # from one arrival to the next, on average


class Models:
    """The models of this process, made when they are first asked for."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Any] = {}
        self._long: dict[str, Any] = {}

    def get(self, size: str, weights: str) -> Any:
        if (size, weights) not in self._made:
            torch.manual_seed(0)
            config = LlamaConfig(
                **SHAPES[size], num_attention_heads=SHAPES[size]["hidden_size"] // 64, num_key_value_heads=4,
                max_position_embeddings=16384, eos_token_id=None, tie_word_embeddings=False,
            )  # fmt: skip
            model = LlamaForCausalLM(config).bfloat16().eval()
            model.generation_config.pad_token_id = 0
            self._made[size, weights] = hf_accel.patch(model, weights=None if weights == "exact" else weights)
        return self._made[size, weights]

    def long_cache(self, size: str) -> Any:
        """A cache that holds a long context; whoever goes on in it does so in a copy."""
        if size not in self._long:
            model = self.get(size, "int8")
            cache = hf_accel.PagedCache(model.config)
            generate(model, tokens(1, LONG[size]), 1, past_key_values=cache)
            self._long[size] = cache
        return copy.deepcopy(self._long[size])


def tokens(rows: int, columns: int) -> Any:
    return torch.randint(1, 2000, (rows, columns), generator=torch.Generator().manual_seed(1))


def generate(model: Any, ids: Any, new: int, **keywords: Any) -> None:
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, **keywords
    )


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def decode(models: Models, size: str, weights: str, rows: int) -> dict[str, float]:
    """A step, prompt left out: of many tokens' seconds those of one token are taken off."""
    model, ids, new = models.get(size, weights), tokens(rows, 16), NEW_TOKENS[size]
    first = timed(lambda: generate(model, ids, 1))
    return {"step": (timed(lambda: generate(model, ids, new + 1)) - first) / new}


def long_decode(models: Models, size: str) -> dict[str, float]:
    model, new = models.get(size, "int8"), NEW_TOKENS[size] // 2
    ids = tokens(1, LONG[size] + 1)
    caches = [models.long_cache(size), models.long_cache(size)]
    first = timed(lambda: generate(model, ids, 1, past_key_values=caches[0]))
    return {"step": (timed(lambda: generate(model, ids, new + 1, past_key_values=caches[1])) - first) / new}


def workload(size: str) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens each asks for: exponentially distributed lengths."""
    draw = random.Random(2)
    return [
        (
            [draw.randrange(1, 2000) for _ in range(draw.randint(4, 48))],
            max(1, min(8 * MEAN[size], round(draw.expovariate(1 / MEAN[size])))),
        )
        for _ in range(REQUESTS)
    ]


def batching(models: Models, size: str) -> dict[str, float]:
    model, requests = models.get(size, "int8"), workload(size)
    configs = []
    for _, new in requests:
        config = copy.deepcopy(model.generation_config)
        config.update(max_new_tokens=new, do_sample=False)
        configs.append(config)
    prompts = [prompt for prompt, _ in requests]
    return {"all": timed(lambda: model.generate_batch(prompts, generation_config=configs))}


def latency(models: Models, size: str) -> dict[str, float]:
    """Requests that arrive at random times, the same in each run: medians over all of them."""
    model, requests, draw = models.get(size, "int8"), workload(size), random.Random(3)
    times: list[list[float]] = [[] for _ in requests]
    readers = []

    def read(request: Any, arrived: float, mine: list[float]) -> None:
        for _ in request:
            mine.append(time.perf_counter() - arrived)

    with hf_accel.Engine(model) as engine:
        due = time.perf_counter()
        for (prompt, new), mine in zip(requests, times, strict=True):
            time.sleep(max(0.0, due - time.perf_counter()))
            request = engine.submit(prompt, max_new_tokens=new, temperature=0.0, stop_token_ids=())
            readers.append(threading.Thread(target=read, args=(request, due, mine)))
            readers[-1].start()
            due += draw.expovariate(1 / SECONDS_BETWEEN[size])
        for reader in readers:
            reader.join()
    between = [after - before for mine in times for before, after in pairwise(mine)]
    return {"first token": statistics.median(mine[0] for mine in times), "between tokens": statistics.median(between)}


def run(models: Models, name: str) -> dict[str, float]:
    """name: such as "decode large int8 8", "long_decode small", "batching large", "latency small"."""
    kind, size, *rest = name.split()
    if kind == "decode":
        return decode(models, size, rest[0], int(rest[1]))
    return {"long_decode": long_decode, "batching": batching, "latency": latency}[kind](models, size)


def main() -> None:
    models = Models()
    for line in sys.stdin:
        print(json.dumps(run(models, line.strip())), flush=True)


if __name__ == "__main__":
    main()
