"""One row times a weight of each stored format on a CPU, in turns with INT8, over weights that no cache holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from hf_accel.config import Layout
from hf_accel.linear import BACKENDS
from hf_accel.linear.formats import MXFP4, QuantizedWeight, state, zeros

from ..harness.bench import Bench
from ..harness.tables import Row, Table

SHAPES = ((4096, 2880), (2880, 2880))  # [out, in]
FORMATS = {"int8": Layout(), "int4": Layout(bits=4, group_size=32), "mxfp4": MXFP4}
COLD_BYTES = 2**28  # of the weights of one format that are used in turn
ROUNDS = 21
NOTE = "The seconds of INT8 over those of the format: processor time of one thread, the median of the rounds."


def measure(bench: Bench) -> list[Table]:
    return [Table("one row", [row(*shape) for shape in SHAPES], NOTE)]


@torch.inference_mode()
def row(out_features: int, in_features: int) -> Row:
    backend = next(backend for backend in BACKENDS if backend.name == "cpu")
    count = max(2, COLD_BYTES // (out_features * in_features))
    packed = {
        name: [backend.pack(filled(layout, (out_features, in_features))) for _ in range(count)]
        for name, layout in FORMATS.items()
    }
    x, threads = torch.randn(1, in_features), torch.get_num_threads()
    torch.set_num_threads(1)

    def seconds(weights: Sequence[object]) -> float:
        start = time.thread_time()
        for weight in weights:
            backend.run(x, weight, None)
        return time.thread_time() - start

    rounds = [{name: seconds(weights) for name, weights in packed.items()} for _ in range(ROUNDS)]
    torch.set_num_threads(threads)
    ratios = {name: statistics.median(r["int8"] / max(r[name], 1e-9) for r in rounds) for name in FORMATS}
    return {"weight": f"{out_features} x {in_features}", **{f"{name}_ratio": ratio for name, ratio in ratios.items()}}


def filled(layout: Layout, shape: tuple[int, int]) -> QuantizedWeight:
    """A weight whose numbers are random and whose scales are about 1 / 64."""
    weight = zeros(layout, shape, dtype=torch.float32, device="cpu")
    for name, tensor in state(weight).items():
        if name in ("weight", "weight_packed"):
            tensor.view(torch.uint8).random_(0, 128)
        elif name == "weight_scale":
            tensor.fill_(1 / 64 if tensor.is_floating_point() else 121)
    return weight
