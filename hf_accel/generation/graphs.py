"""CUDA graphs behind an interface: a pass is captured once, and replayed without the launches' cost."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from ..kernels.triton import overlapping

DEVICES = ("cuda",)  # where there may be graphs
SWITCH = "HF_ACCEL_CUDA_GRAPHS"  # "0" in the environment turns them off
WARM_UPS = 1  # calls before a capture: kernels are compiled, and libraries take their memory, in these


class Graph(Protocol):
    """The recorded work of a function on the device. It reads and writes the same addresses at each replay.

    nbytes: the memory that its capture took.
    """

    nbytes: int

    def replay(self) -> None: ...


class GraphMaker(Protocol):
    """Captures functions that work on one device. The graphs share a pool of memory, so no two may run at once."""

    def capture(self, function: Callable[[], object]) -> Graph:
        """Call the function at least twice, the last time to capture it. Raises what the function raises.

        The function must not wait for the device, and must read numbers that change from tensors alone.
        """

    def free_bytes(self) -> int:
        """The memory of the device that nothing has taken."""

    def total_bytes(self) -> int:
        """The memory of the device."""


class CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device, nbytes: int) -> None:
        self._graph, self._device, self.nbytes = graph, device, nbytes

    def replay(self) -> None:
        with torch.cuda.device(self._device):  # whose current stream it runs in
            self._graph.replay()


class CudaGraphs:
    """A GraphMaker for an NVIDIA GPU. All captures use one stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._alive: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, function: Callable[[], object]) -> CudaGraph:
        if not self._alive:  # torch does not take a pool again whose graphs have all gone
            self._pool = torch.cuda.graph_pool_handle()
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.device(self.device), torch.cuda.stream(stream), overlapping():
            for _ in range(WARM_UPS):
                function()
            stream.synchronize()
            before = torch.cuda.memory_reserved(self.device)
            with _no_collection():
                # thread_local: the work of other threads (another Engine) does not end the capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
        current.wait_stream(stream)
        made = CudaGraph(graph, self.device, torch.cuda.memory_reserved(self.device) - before)
        self._alive.add(made)
        return made

    def free_bytes(self) -> int:
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return free

    def total_bytes(self) -> int:
        total: int = torch.cuda.mem_get_info(self.device)[1]
        return total


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing memory of the device during a capture, which would end it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


SPLIT = "several processes run the model, which would capture at times of their own"


def refusal(device: torch.device) -> str | None:
    """Return why there are no graphs on a device, as a clause; None if there are."""
    if device.type != "cuda":
        return f"the model is on {device.type}, and graphs are for an NVIDIA GPU"
    if torch.version.hip is not None:
        return "graphs were made for NVIDIA's GPUs, and this one is AMD's"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    return None


def make_graphs(device: torch.device) -> GraphMaker | None:
    """The GraphMaker of a device; None where there are no graphs, see refusal()."""
    return None if refusal(device) is not None else CudaGraphs(device)
