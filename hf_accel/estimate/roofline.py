"""How long work takes at least: roofline model (Williams et al. 2009, doi:10.1145/1498765.1498785)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..hardware import detect, float_peak, read_bandwidth

# Operations per byte where only one speed is given: between CPUs (10 to 50) and data-centre GPUs (150 to 300).
TYPICAL_BALANCE = 100.0


class Work(NamedTuple):
    """Bytes read and operations done by one pass of a model."""

    nbytes: float
    operations: float


class Machine(NamedTuple):
    """bandwidth: bytes per second; compute: operations per second, two per multiply-add."""

    bandwidth: float
    compute: float

    @classmethod
    def of(
        cls, *, bandwidth: float | None, compute: float | None, dtype: torch.dtype, device: torch.device | str
    ) -> Machine:
        """Measure `device` if nothing is given. One number alone may be another machine's, so it is not mixed."""
        if bandwidth is None and compute is None:
            hardware = detect(device)
            return cls(bandwidth=read_bandwidth(hardware), compute=float_peak(hardware, dtype))
        if bandwidth is None:
            bandwidth = (compute or 0.0) / TYPICAL_BALANCE
        return cls(bandwidth=bandwidth, compute=compute or bandwidth * TYPICAL_BALANCE)

    def seconds(self, work: Work) -> float:
        return max(work.nbytes / self.bandwidth, work.operations / self.compute)

    def bound(self, work: Work) -> str:
        """Which of "memory" and "compute" takes longer."""
        return "compute" if work.operations / self.compute > work.nbytes / self.bandwidth else "memory"
