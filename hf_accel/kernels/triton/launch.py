"""A launch of a Triton kernel as a value: it can be run, and it can be compiled for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import triton as kernels

OVERLAPS = "OVERLAPS"  # the constant by which a kernel begins while the launch before it runs
REPEATED = 8  # calls that are timed
CACHE_BYTES = 2**28  # more than the cache of any GPU holds


@dataclass(frozen=True, eq=False, kw_only=True)
class Launch:
    """One launch of `kernel`, a function that triton.jit made, on the device of its first tensor.

    grid: programs along each axis; with 0 along one, nothing runs. arguments: tensors, numbers and None by name.
    constants: the parameters that are tl.constexpr, by name. num_warps, num_stages, fuses: options of the compiler.
    fuses: whether it may round a product and a sum together, which it may do differently in two kernels.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    fuses: bool = True

    def run(self) -> None:
        if 0 in self.grid:
            return
        with self._on_device():
            self.kernel[self.grid](**self.arguments, **self.constants_for(overlaps=kernels.overlap()), **self.options)

    def constants_for(self, *, overlaps: bool) -> dict[str, Any]:
        """overlaps: whether it begins while the launch before it runs, if the kernel can do that."""
        return self.constants | ({OVERLAPS: overlaps} if OVERLAPS in self.kernel.arg_names else {})

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options, with the one for fusing, whose default differs between versions of Triton."""
        overlaps = {"launch_pdl": True} if OVERLAPS in self.kernel.arg_names and kernels.overlap() else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fuses, **overlaps}

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the tensors' GPU the current one, on which Triton launches."""
        first: Tensor = next(value for value in self.arguments.values() if isinstance(value, Tensor))
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(first.device)


def uncached_seconds(run: Callable[[], object]) -> float:
    """Return the least time of one call on the GPU.

    Its cache is emptied before each call; the first calls, which compile, do not count. The calls are replayed as a
    graph: launched one by one, the later launches of a call are late where the host is slow, and would be timed.
    """
    cleared = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")
    marks = [(_mark(), _mark()) for _ in range(REPEATED)]
    graph = torch.cuda.CUDAGraph()
    run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for start, end in marks:
            cleared.zero_()
            start.record()
            run()
            end.record()
    graph.replay()
    torch.cuda.synchronize()
    return min(float(start.elapsed_time(end)) for start, end in marks) / 1e3


def _mark() -> torch.cuda.Event:
    """An event that a graph records with its time."""
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
