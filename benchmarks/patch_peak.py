"""Time and peak memory of one way to a quantized model, in a process of its own.

python -m benchmarks.patch_peak WAY WEIGHTS NAME LAYERS, with 0 for all layers. The ways:
    memory      patch(keep_original=False) of a model in memory
    checkpoint  patch(keep_original="auto") of a model loaded from the checkpoint NAME
    load        from_pretrained(NAME, quantization_config=AccelConfig(...))
    stock       from_pretrained(NAME)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import hf_accel

from .models import load_model, weight_bytes
from .peak import peak_bytes

Make = Callable[[], PreTrainedModel]


def way_of(way: str, weights: str, name: str, layers: int | None) -> Make:
    """What is measured, made ready: a model in memory is loaded before."""
    if way == "stock":
        return lambda: AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    if way == "load":
        config = hf_accel.AccelConfig(weights=weights)
        return lambda: AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, quantization_config=config)
    keep = {"memory": False, "checkpoint": "auto"}[way]
    model = load_model(name, layers=layers)
    return lambda: hf_accel.patch(model, weights=weights, keep_original=keep)


def main(way: str, weights: str, name: str, layers: str) -> None:
    disable_progress_bar()
    make = way_of(way, weights, name, int(layers) or None)
    made: list[PreTrainedModel] = []

    def run() -> None:
        made.append(make())

    start = time.perf_counter()
    peak = peak_bytes(run)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_bytes": peak, "result_bytes": weight_bytes(made[0])}))


if __name__ == "__main__":
    main(*sys.argv[1:])
