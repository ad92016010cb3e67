"""The speeds of this machine: how fast memory is read, and how long the products take that patch() would run.

Products are measured by what computes them here, with few rows and with many, since no count of operations says how
long 16 rows take. The matrices are read in turn and are too large for the last cache together, unless the model is
smaller. Each is measured once per process and number of threads, in about a second.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..fused.projections import UNLIMITED, native_rows
from ..hardware import Hardware, detect, float_peak, read_bandwidth
from ..hardware.speed import least_seconds
from ..kernels.cpu.float_linear import TILE_ROWS, FloatLinear
from ..kernels.cpu.library import FLOATS, refusal
from ..linear import LinearSpec, choose
from ..linear.timing import example, timed_outputs
from .roofline import Machine, Products
from .weights import MULTIPLIED, WeightTensor
from .workload import Workload

ROWS = (1, 4, 8, 16, 32, 64, 512)
CACHES = 2  # times the last cache: what is read in turn has left it before its turn comes again

Run = Callable[[int, Tensor], object]  # the product of rows and a matrix by its number


def measure(workload: Workload, device: torch.device | str) -> Machine:
    """The speeds of `device`, and on a CPU the products of a model's most frequent matrix."""
    hardware = detect(device)
    bandwidth = read_bandwidth(hardware)
    if hardware.device != "cpu":
        return Machine(bandwidth, float_peak(hardware, workload.dtype))
    # torch may have no instructions for half precision
    machine = Machine(bandwidth, max(float_peak(hardware, dtype) for dtype in {workload.dtype, torch.float32}))
    if workload.weights == "nf4":  # products of bitsandbytes
        return machine
    matrices = Counter(tensor for tensor in workload.tensors if tensor.kind in MULTIPLIED)
    quantized = Counter({tensor: count for tensor, count in matrices.items() if tensor.spec is not None})
    tensor, count = largest(quantized or matrices)
    uncached, threads = _uncached_bytes(hardware), torch.get_num_threads()
    if tensor.spec is None:
        found = _floats((tensor.shape[-2], tensor.shape[-1]), workload.dtype, count, uncached, threads)
        return machine._replace(floats=beyond_reading(found, workload.dtype.itemsize, bandwidth))
    spec = replace(tensor.spec, device_type="cpu")  # the model that was counted is on meta
    found = _quantized(spec, count, uncached, threads)
    return machine._replace(quantized=beyond_reading(found, spec.weight_bytes / tensor.numel, bandwidth))


def largest(matrices: Counter[WeightTensor]) -> tuple[WeightTensor, int]:
    """The kind of matrix that most weights are in, and how many there are."""
    return max(matrices.items(), key=lambda item: item[0].numel * item[1])


def beyond_reading(products: Products, nbytes: float, bandwidth: float) -> Products:
    """What is left of the seconds of each weight, when `nbytes` of it are read."""
    seconds = tuple(max(0.0, each - nbytes / bandwidth) for each in products.seconds)
    return products._replace(seconds=seconds)


def _uncached_bytes(hardware: Hardware) -> int:
    free = hardware.free_memory or math.inf
    return int(min(CACHES * (hardware.l3_bytes or hardware.l2_bytes or 2**24), 2**28, free / 4))


@functools.cache
@torch.no_grad()
def _quantized(spec: LinearSpec, count: int, nbytes: int, threads: int) -> Products:
    """count: such matrices in the model. Seconds of each weight, with what reading it takes."""
    backend, outputs = choose(spec).backend, timed_outputs(spec)
    count = min(count, math.ceil(nbytes * spec.out_features / (spec.weight_bytes * outputs)))
    packed = [backend.pack(example(spec, outputs)) for _ in range(count)]
    return _timed(lambda i, x: backend.run(x, packed[i], None), count, (outputs, spec.in_features), spec.dtype)


@functools.cache
@torch.no_grad()
def _floats(shape: tuple[int, int], dtype: torch.dtype, count: int, nbytes: int, threads: int) -> Products:
    spec = LinearSpec(in_features=shape[1], out_features=shape[0], bits=8, dtype=dtype)
    outputs = timed_outputs(spec)
    count = min(count, math.ceil(nbytes / (outputs * shape[1] * dtype.itemsize)))
    weights = [torch.ones(outputs, shape[1], dtype=dtype) for _ in range(count)]
    rows = native_rows(dtype) if refusal() is None and dtype in FLOATS else 0
    tile_rows = 1 if rows == UNLIMITED else TILE_ROWS
    native = [FloatLinear([weight], [None], tile_rows=tile_rows) for weight in weights] if rows else []

    def run(i: int, x: Tensor) -> Tensor:
        return native[i](x) if len(x) <= rows else F.linear(x, weights[i])

    return _timed(run, count, (outputs, shape[1]), dtype)


def _timed(run: Run, count: int, shape: tuple[int, int], dtype: torch.dtype) -> Products:
    turn = itertools.cycle(range(count))

    def seconds_of(rows: int) -> float:
        x = torch.ones(rows, shape[1], dtype=dtype)
        return least_seconds(lambda: run(next(turn), x), "cpu") / math.prod(shape)

    seconds = map(seconds_of, ROWS)
    return Products(ROWS, tuple(itertools.accumulate(seconds, max)))  # more rows never take less
