"""Time and memory of one way to a patched model, in a process of its own.

python -m benchmarks.topics.patch_peak WAY WEIGHTS NAME LAYERS, with None for weights as they are and 0 for all layers.
Ways:
    memory      patch(keep_original=False) of a model in memory
    checkpoint  patch(keep_original="auto") of a model loaded from the checkpoint NAME
    load        from_pretrained(NAME, quantization_config=AccelConfig(...))
    saved       from_pretrained of the checkpoint NAME that a patched model wrote
    copied      the same, where HF_ACCEL_MAP_WEIGHTS=0 has the weights copied out of the file
    fit         load(NAME, fit=...): room for what the process has, for keys and values, for a pass, and for WEIGHTS
                times the bytes of the float weights
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
from hf_accel.checkpoints.fitting import process_bytes
from hf_accel.undo.state import state_of

from ..harness.models import load_model, weight_bytes
from ..harness.peak import KINDS, TOTAL, peaks, resident

Make = Callable[[], PreTrainedModel]


def way_of(way: str, weights: str | None, name: str, layers: int | None) -> Make:
    """What is measured, made ready: a model in memory is loaded before."""
    if way == "fit":
        counted = hf_accel.estimate(name, weights=None, bandwidth=1e9, dtype=torch.bfloat16)
        room = process_bytes() + counted.total_bytes - round((1 - float(weights or 1)) * counted.weights_bytes)
        return lambda: hf_accel.load(name, dtype=torch.bfloat16, fit=room)
    if way in ("stock", "saved", "copied"):
        return lambda: from_pretrained(name)
    if way == "load":
        return lambda: from_pretrained(name, quantization_config=hf_accel.AccelConfig(weights=weights))
    if way == "checkpoint":
        return lambda: hf_accel.patch(from_pretrained(name), weights=weights)
    model = load_model(name, layers=layers)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # a checkpoint is mapped
    return lambda: hf_accel.patch(model, weights=weights, keep_original=False)


def from_pretrained(name: str, **keywords: object) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, **keywords)
    return model


def main(way: str, weights: str, name: str, layers: str) -> None:
    disable_progress_bar()
    asked = None if weights == "None" else weights
    known = asked if asked in (None, "int8", "int4") else "int8"
    hf_accel.patch(load_model("tiny"), weights=known, keep_original=False)  # imports what will be needed
    before = resident()
    make = way_of(way, asked, name, int(layers) or None)
    made: list[PreTrainedModel] = []
    seconds: list[float] = []

    def run() -> None:
        start, computed = time.perf_counter(), time.process_time()
        made.append(make())
        seconds.extend((time.perf_counter() - start, time.process_time() - computed))

    resident()  # what loading has left over is nothing that patching takes
    highest = peaks(run, before) or dict.fromkeys(("peak_bytes", *KINDS))
    after = resident()
    held = None if before is None or after is None else after[TOTAL] - before[TOTAL]
    chosen = state_of(made[0]).config.weights if hf_accel.is_patched(made[0]) else None
    found = {"held_bytes": held, "result_bytes": weight_bytes(made[0]), "chosen": chosen and chosen.label}
    print(json.dumps({"seconds": seconds[0], "cpu_seconds": seconds[1], **highest, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
