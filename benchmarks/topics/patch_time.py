"""What it costs to get there: seconds to quantize a model in memory, and to take it back."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from transformers import PreTrainedModel

import hf_accel
from hf_accel.cli.measurement import WrongResultError, take_turns
from hf_accel.patching.twin import twin

from ..harness.bench import Bench
from ..harness.tables import Row, Table
from ..setups import Setup

Seconds = tuple[float, float | None]  # of patch; of unpatch, where there is a way back


def measure(bench: Bench) -> list[Table]:
    ours = {s.name: partial(patch_and_unpatch, bench, s) for s in bench.setups if s.name.startswith("hf_accel")}
    # no warm-up: a script patches once
    results = take_turns(ours, rounds=bench.settings.rounds, warm_up=False)
    rows = [row(name, seconds) for name, seconds in results.items()]
    rows += [row(s.name, [(bench.entrant(s).prepare_seconds, None)]) for s in bench.setups if s.is_peer]
    note = "Other libraries: from_pretrained with the weights in memory, once."
    return [Table("patch and unpatch", rows, note)]


def patch_and_unpatch(bench: Bench, setup: Setup) -> Seconds:
    model = twin(bench.model)
    start = time.perf_counter()
    model = setup.prepare(model)
    patched = time.perf_counter()
    hf_accel.unpatch(model)
    unpatched = time.perf_counter()
    check_restored(bench, setup, model)
    return patched - start, unpatched - patched


@torch.no_grad()
def check_restored(bench: Bench, setup: Setup, model: PreTrainedModel) -> None:
    prompt = bench.tokens(batch=1, length=4)
    if not torch.equal(model(input_ids=prompt).logits, bench.model(input_ids=prompt).logits):
        raise WrongResultError(f"{setup.name}: unpatch did not bring stock's logits back")


def row(name: str, seconds: list[Seconds]) -> Row:
    """The medians; unpatch None: there is no way back."""
    patch, unpatch = zip(*seconds, strict=True)
    undo = None if None in unpatch else statistics.median(unpatch)
    return {"setup": name, "patch_seconds": statistics.median(patch), "unpatch_seconds": undo}
