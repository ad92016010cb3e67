"""The time of one row through a backend and through the stock linear, on this machine."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ..hardware.device import least_seconds
from .backend import Backend, LinearSpec
from .formats import QuantizedWeight, state, zeros

TIMED = 2**24  # weights at most; a larger layer is taken in proportion
MULTIPLE = 64  # outputs that every backend takes


@functools.cache
@torch.no_grad()
def measure(spec: LinearSpec, backend: Backend) -> tuple[float, float]:
    """Measure the seconds of one row (stock linear, `backend`): the least of a few runs, on made-up weights."""
    outputs = timed_outputs(spec)
    weight = example(spec, outputs)
    packed, dense = backend.pack(weight), weight.dequantize(spec.dtype)
    x = torch.ones(1, spec.in_features, dtype=spec.dtype, device=spec.device_type)
    stock = least_seconds(lambda: F.linear(x, dense), spec.device_type)
    chosen = least_seconds(lambda: backend.run(x, packed, None), spec.device_type)
    share = spec.out_features / outputs
    return stock * share, chosen * share


def timed_outputs(spec: LinearSpec) -> int:
    """Return the number of a layer's outputs that are timed: all, or some of a large one."""
    return min(spec.out_features, max(1, TIMED // spec.in_features // MULTIPLE) * MULTIPLE)


def example(spec: LinearSpec, outputs: int) -> QuantizedWeight:
    """Make a weight of zeros with the layout of `spec` and another number of outputs."""
    device = torch.device(spec.device_type)
    shape = (outputs, spec.in_features)
    weight = zeros(spec.layout, shape, dtype=spec.dtype, device=device)
    for values in state(weight).values():
        values.view(torch.uint8).add_(
            0
        )  # pages that were never written all map to one page of zeros, which stays in cache
    return weight
