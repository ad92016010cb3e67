"""What one row costs through a backend and through the stock linear, on this machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import Backend, LinearSpec
from .formats import QuantizedWeight, state, zeros

TIMED = 2**24  # weights at most; a larger layer is taken in proportion
MULTIPLE = 64  # outputs that every backend takes
REPEATS = 5


@functools.cache
def measure(spec: LinearSpec, backend: Backend) -> tuple[float, float]:
    """Seconds of one row (stock linear, `backend`): the least of a few runs, on weights made up here."""
    outputs = min(spec.out_features, max(1, TIMED // spec.in_features // MULTIPLE) * MULTIPLE)
    weight = _example(spec, outputs)
    packed, dense = backend.pack(weight), weight.dequantize(spec.dtype)
    x = torch.ones(1, spec.in_features, dtype=spec.dtype, device=spec.device_type)
    stock = _seconds(lambda: F.linear(x, dense))
    chosen = _seconds(lambda: backend.run(x, packed, None))
    share = spec.out_features / outputs
    return stock * share, chosen * share


def _example(spec: LinearSpec, outputs: int) -> QuantizedWeight:
    device = torch.device(spec.device_type)
    shape = (outputs, spec.in_features)
    weight = zeros(spec.bits, shape, spec.group_size, symmetric=spec.symmetric, dtype=spec.dtype, device=device)
    for values in state(weight).values():
        values.add_(0)  # pages that were never written all map to one page of zeros, which stays in cache
    return weight


@torch.no_grad()
def _seconds(run: Callable[[], Tensor]) -> float:
    run()
    return min(_once(run) for _ in range(REPEATS))


def _once(run: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    run().cpu()  # waits for an accelerator
    return time.perf_counter() - start
