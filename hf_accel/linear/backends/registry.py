"""The linear backends in order of preference, the choice among them, and the time of one row through each."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...errors import UnsupportedError
from ...hardware.device import least_seconds
from ..formats import QuantizedWeight, state, zeros
from .backend import Backend, LinearSpec
from .cpu import Cpu
from .onednn import OneDNN
from .reference import REFERENCES, Reference, ReferenceByRow
from .torch_int4 import TorchInt4
from .torch_int8 import TorchInt8
from .torch_int_mm import TorchIntMM
from .torch_scaled_mm import TorchScaledMM
from .triton import Triton

BACKENDS: tuple[Backend, ...] = (
    Cpu(), OneDNN(), TorchInt8(), TorchInt4(), Triton(row_invariant=False, rounding="many rows"),
    Triton(row_invariant=False, rounding="many rows", rounded_to="fp8"),
    Triton(row_invariant=False), Triton(row_invariant=True, rounding="always"), Triton(row_invariant=True),
    Triton(row_invariant=False, rounding="always", rounded_to="fp8"),
    Triton(row_invariant=True, rounding="always", rounded_to="fp8"),
    TorchIntMM(), TorchScaledMM(), *REFERENCES.values(), ReferenceByRow("int8"), ReferenceByRow("fp8"),
)  # fmt: skip

# Weights below which a backend that is slow to start comes last, except for the reference.
# A rule and not a stopwatch: the choice decides the numbers that a layer computes.
SMALL = 2**22
TIMED = 2**24  # weights at most; a larger layer is taken in proportion
MULTIPLE = 64  # outputs that every backend takes


@dataclass(frozen=True)
class BackendChoice:
    """The backend of a layer, why those before it were not taken, and what it costs.

    row_invariant: whether a row-invariant one was asked for.
    """

    spec: LinearSpec
    backend: Backend
    refusals: tuple[tuple[str, str], ...]  # (backend name, reason)
    row_invariant: bool = False

    @property
    def note(self) -> str | None:
        return self.backend.note(self.spec)

    @property
    def seconds(self) -> float:
        """Seconds that one row takes, measured once per process and spec."""
        return measure(self.spec, self.backend)[1]

    @property
    def stock_seconds(self) -> float:
        """Seconds that one row takes through the stock linear in the same dtype."""
        return measure(self.spec, self.backend)[0]


@functools.cache
def choose(
    spec: LinearSpec, name: str = "auto", *, row_invariant: bool = False, finds_rows: bool = False
) -> BackendChoice:
    """The first backend, of those called `name`, that does not refuse.

    row_invariant: whether backends that are row-invariant come before the others. finds_rows: whether it must find
    single rows of what it has packed.
    Raises UnsupportedError for an unknown name, and if every backend of that name refuses.
    """
    names = ("auto", *dict.fromkeys(backend.name for backend in BACKENDS))
    if name not in names:
        raise UnsupportedError(f"linear backend {name!r} is not known; choose one of {', '.join(map(repr, names))}")
    refusals: dict[str, str] = {}
    for backend in sorted(_candidates(spec, name), key=lambda backend: row_invariant and not backend.row_invariant):
        reason = backend.refuses(spec)
        if reason is None and finds_rows and not backend.finds_rows:
            reason = "it does not find single rows of what it has packed"
        if reason is None:
            refusals.pop(backend.name, None)  # of another variant of it
            return BackendChoice(spec, backend, tuple(refusals.items()), row_invariant)
        refusals[backend.name] = reason
    reasons = "; ".join(refusals.values()) or f"it has no {spec.layout.label.upper()} weights"
    raise UnsupportedError(
        f"linear backend {name!r} refuses a layer [{spec.out_features}, {spec.in_features}]: {reasons}; use 'auto'"
    )


def _candidates(spec: LinearSpec, name: str) -> list[Backend]:
    able = [backend for backend in BACKENDS if backend.reads(spec)]
    meant = [backend for backend in able if backend.is_for(spec.device_type)]
    if name == "auto":
        able = meant
    else:
        named = [backend for backend in able if backend.name == name]
        able = [backend for backend in named if backend in meant] or named
    if spec.in_features * spec.out_features < SMALL:
        able.sort(key=lambda backend: (isinstance(backend, Reference), backend.slow_start))
    return able


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
        # Pages that were never written all map to one page of zeros, which stays in the cache.
        values.zero_()
    return weight
