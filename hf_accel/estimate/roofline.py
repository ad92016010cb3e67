"""How long work takes, between two limits.

At least: the shorter of reading and arithmetic hides behind the longer (roofline, Williams et al. 2009,
doi:10.1145/1498765.1498785).
At most: one after the other, which is what CPUs were measured to do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..hardware import detect, float_peak, read_bandwidth
from ..hardware.integer_peak import integer_peak
from ..hardware.speed import fp8_peak

# Operations per byte where only one speed is given: between CPUs (10 to 50) and data-centre GPUs (150 to 300).
TYPICAL_BALANCE = 100.0


class Work(NamedTuple):
    """Bytes read and operations done by one pass of a model. integers, fp8: those of the operations on such inputs."""

    nbytes: float
    operations: float
    integers: float = 0.0
    fp8: float = 0.0


class Machine(NamedTuple):
    """bandwidth: bytes per second; compute, integers, fp8: operations per second, two per multiply-add, on inputs in
    floating point, INT8 and FP8; the last two are 0 where that is as fast as compute."""

    bandwidth: float
    compute: float
    integers: float = 0.0
    fp8: float = 0.0

    @classmethod
    def of(
        cls,
        *,
        bandwidth: float | None,
        compute: float | None,
        compute_fp8: float | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Machine:
        """Measure `device` if nothing is given. One number alone may be another machine's, so it is not mixed."""
        if bandwidth is None and compute is None:
            hardware = detect(device)
            dtypes = {dtype, torch.float32} if hardware.device == "cpu" else {dtype}  # it may have no half precision
            compute = max(float_peak(hardware, one) for one in dtypes)
            on_cpu = hardware.device == "cpu"
            integers, fp8 = (integer_peak("cpu"), None) if on_cpu else (None, fp8_peak(hardware))
            return cls(read_bandwidth(hardware), compute, integers or 0.0, compute_fp8 or fp8 or 0.0)
        if bandwidth is None:
            bandwidth = (compute or 0.0) / TYPICAL_BALANCE
        return cls(bandwidth, compute or bandwidth * TYPICAL_BALANCE, fp8=compute_fp8 or 0.0)

    def reading(self, work: Work) -> float:
        """Seconds."""
        return work.nbytes / self.bandwidth

    def computing(self, work: Work) -> float:
        """Seconds."""
        floats = (work.operations - work.integers - work.fp8) / self.compute
        return floats + work.integers / (self.integers or self.compute) + work.fp8 / (self.fp8 or self.compute)

    def seconds(self, work: Work) -> float:
        """At least."""
        return max(self.reading(work), self.computing(work))

    def seconds_in_turn(self, work: Work) -> float:
        """At most, at these speeds: nothing is read while something is computed."""
        return self.reading(work) + self.computing(work)

    def bound(self, work: Work) -> str:
        """Which of "memory" and "compute" takes longer."""
        return "compute" if self.computing(work) > self.reading(work) else "memory"
