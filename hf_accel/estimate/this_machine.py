"""The speeds of this machine: the bandwidth of its memory, and the seconds of products and attention as they would
run.

They are measured with few rows and with many, since no count of operations says how long 16 rows take. Matrices, keys
and values are read in turn, and are too large for the last cache together, unless the model is smaller. Each is
measured once per process and number of threads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import AttentionSpec
from ..attention import choose_backend as choose_attention
from ..cache.kinds import KeysAndValues
from ..config import Layout
from ..fused.measured_rows import rows_here
from ..hardware import Hardware, detect, float_peak, read_bandwidth
from ..hardware.device import fp8_peak, least_seconds
from ..kernels.cpu.float_linear import FloatLinear
from ..kernels.cpu.library import FLOATS, refusal
from ..kernels.layouts import KV, AttentionOptions
from ..linear import LinearSpec, choose
from ..linear.backends.registry import example, timed_outputs
from .layer_bytes import StatefulLayer
from .roofline import ByRows, Machine
from .workload import MULTIPLIED, WeightTensor, Workload

MEASURED_ROWS = (1, 4, 8, 16, 32, 64, 512)
QUERIES = (1, 128)
SEQUENCES, KEYS = 8, 512  # that these queries attend over
CACHES = 2  # times the last cache: what is read in turn has left it before its turn comes again
# What Python takes around the kernels: about what profile.json has for 22 layers, in the folder
# benchmarks/results/amd-epyc-zen-4-avx512_vnni_bf16. It is more after kernels that read more, which drive Python's own
# data out of the caches.
PASS_SECONDS, LAYER_SECONDS = 1e-3, 1e-4

Run = Callable[[Tensor], object]  # a product of rows, or the attention of queries


def measure_machine(workload: Workload, device: torch.device | str) -> Machine:
    """Measure the speeds of `device`, and on a CPU the products of a model's most frequent matrix."""
    hardware = detect(device)
    bandwidth = read_bandwidth(hardware)
    if hardware.device != "cpu":
        return Machine(bandwidth, float_peak(hardware, workload.dtype), fp8=fp8_peak(hardware) or 0.0)
    # torch may have no instructions for half precision
    compute = max(float_peak(hardware, dtype) for dtype in {workload.dtype, torch.float32})
    if workload.weights == "nf4":  # products of bitsandbytes
        return Machine(bandwidth, compute)
    matrices = Counter(tensor for tensor in workload.tensors if tensor.kind in MULTIPLIED)
    quantized = Counter({tensor: count for tensor, count in matrices.items() if tensor.spec is not None})
    tensor, count = largest(quantized or matrices)
    here = Conditions(_uncached_bytes(hardware), torch.get_num_threads())
    layer = replace(max(workload.layers, key=lambda one: one.decode_operations), tokens=KEYS, kind=KeysAndValues(None))
    machine = Machine(
        bandwidth,
        compute,
        attention=_attention(layer, workload.dtype, here).beyond_reading(bandwidth),
        pass_seconds=PASS_SECONDS,
        layer_seconds=LAYER_SECONDS,
    )
    if tensor.spec is None:
        found = _floats((tensor.shape[-2], tensor.shape[-1]), workload.dtype, count, here)
        return machine._replace(floats=found.beyond_reading(bandwidth))
    spec = replace(tensor.spec, device_type="cpu")  # the model that was counted is on meta
    return machine._replace(quantized=_quantized(spec, count, here).beyond_reading(bandwidth))


class Conditions(NamedTuple):
    """The conditions of a measurement. nbytes: bytes of all matrices read in turn; threads: torch's threads."""

    nbytes: int
    threads: int


class Measured(NamedTuple):
    """Seconds of calls by their number of rows; a call reads `nbytes` and does `operations` for each row."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    nbytes: float
    operations: tuple[float, ...]

    def beyond_reading(self, bandwidth: float) -> ByRows:
        """Return the seconds of arithmetic, without those of reading the bytes; more rows never take less."""
        left = (max(0.0, each - self.nbytes / bandwidth) for each in self.seconds)
        weights = (count / (2 * rows) for rows, count in zip(self.rows, self.operations, strict=True))
        each = (one / count for one, count in zip(left, weights, strict=True))
        return ByRows(self.rows, tuple(itertools.accumulate(each, max)))


def largest(matrices: Counter[WeightTensor]) -> tuple[WeightTensor, int]:
    """Find the shape of matrix that holds most of the weights, and how many matrices have it."""
    return max(matrices.items(), key=lambda item: item[0].numel * item[1])


def _uncached_bytes(hardware: Hardware) -> int:
    free = hardware.free_memory or math.inf
    return int(min(CACHES * (hardware.l3_bytes or hardware.l2_bytes or 2**24), 2**28, free / 4))


@functools.cache
@torch.no_grad()
def _quantized(spec: LinearSpec, count: int, here: Conditions) -> Measured:
    """Measure products by quantized matrices. count: the matrices of this shape in the model."""
    backend, outputs = choose(spec).backend, timed_outputs(spec)
    size = spec.weight_bytes * outputs / spec.out_features
    packed = [backend.pack(example(spec, outputs)) for _ in range(min(count, math.ceil(here.nbytes / size)))]
    weights = [functools.partial(backend.run, packed=one, bias=None) for one in packed]
    return _products(weights, (outputs, spec.in_features), spec.dtype, size)


@functools.cache
@torch.no_grad()
def _floats(shape: tuple[int, int], dtype: torch.dtype, count: int, here: Conditions) -> Measured:
    """Measure products by floating-point matrices: ours up to the rows that it is used for, torch's beyond."""
    outputs = timed_outputs(LinearSpec(in_features=shape[1], out_features=shape[0], layout=Layout(), dtype=dtype))
    size = outputs * shape[1] * dtype.itemsize
    rows = rows_here(dtype) if refusal() is None and dtype in FLOATS else 0

    def product(weight: Tensor) -> Run:
        native = FloatLinear([weight], [None]) if rows else None
        return lambda x: F.linear(x, weight) if native is None or len(x) > rows else native(x)

    weights = [torch.ones(outputs, shape[1], dtype=dtype) for _ in range(min(count, math.ceil(here.nbytes / size)))]
    return _products([product(weight) for weight in weights], (outputs, shape[1]), dtype, size)


def _products(runs: Sequence[Run], shape: tuple[int, int], dtype: torch.dtype, size: float) -> Measured:
    inputs = [torch.ones(rows, shape[1], dtype=dtype) for rows in MEASURED_ROWS]
    return Measured(
        MEASURED_ROWS, _timed(runs, inputs), size, tuple(2.0 * rows * math.prod(shape) for rows in MEASURED_ROWS)
    )


@functools.cache
@torch.no_grad()
def _attention(layer: StatefulLayer, dtype: torch.dtype, here: Conditions) -> Measured:
    """Measure attention with the last queries of a few sequences."""
    numbers = layer.numbers
    heads, kv_heads, dim = numbers.queries, numbers.heads, max(numbers.keys, numbers.values)
    spec = AttentionSpec(
        dtype=dtype, device_type="cpu", head_dim=dim, value_dim=dim, num_heads=heads, num_kv_heads=kv_heads
    )
    backend, options = choose_attention(spec)[0], AttentionOptions(scale=dim**-0.5)
    size = SEQUENCES * layer.kv_bytes(dtype=dtype, quantized=None)
    shape = (2, SEQUENCES, kv_heads, layer.tokens, dim)
    caches = [KV(*torch.ones(shape, dtype=dtype)) for _ in range(math.ceil(here.nbytes / size))]
    runs = [functools.partial(backend.dense, kv=cache, options=options) for cache in caches]
    seconds = _timed(runs, [torch.ones(SEQUENCES, heads, queries, dim, dtype=dtype) for queries in QUERIES])
    seen = [queries * layer.tokens - queries * (queries - 1) // 2 for queries in QUERIES]  # keys, by all queries
    return Measured(QUERIES, seconds, size, tuple(4.0 * SEQUENCES * heads * dim * keys for keys in seen))


def _timed(runs: Sequence[Run], inputs: Sequence[Tensor]) -> tuple[float, ...]:
    """Return the least seconds of each call; the inputs are read in turn."""
    turn = itertools.cycle(runs)
    return tuple(least_seconds(functools.partial(_next, turn, x), "cpu") for x in inputs)


def _next(turn: Iterator[Run], x: Tensor) -> None:
    next(turn)(x)
