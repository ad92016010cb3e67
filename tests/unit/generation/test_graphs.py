"""CudaGraphs without a GPU: what it asks of torch, and in which order."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_accel.generation import graphs
from hf_accel.generation.agreement import ALONE
from hf_accel.generation.graphs import CudaGraphs, make_graphs, refusal
from hf_accel.patching.explain import _graphs_line

CUDA = torch.device("cuda", 0)


class Recorder:
    """Stands for torch.cuda, and for the streams and graphs that it makes."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.reserved = 1000
        self.pools: list[weakref.WeakSet[FakeGraph]] = []  # the graphs of each

    def graph_pool_handle(self) -> tuple[int, int]:
        self.pools.append(weakref.WeakSet())
        return 0, len(self.pools) - 1

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream("side", self)

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream("main", self)

    def device(self, device: torch.device) -> Any:
        return nullcontext()

    def stream(self, stream: FakeStream) -> Any:
        self.events.append(f"on {stream.name}")
        return nullcontext()

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 5, 10


class FakeStream:
    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.events = name, recorder.events

    def wait_stream(self, other: FakeStream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.events.append(f"the host waits for {self.name}")


class FakeGraph:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self.recorder.events.append(f"begin in {pool}, {capture_error_mode}")
        _, number = pool
        is_new = f"begin in {pool}" not in " ".join(self.recorder.events[:-1])
        assert is_new or self.recorder.pools[number], "torch: use_count > 0 INTERNAL ASSERT FAILED"
        self.recorder.pools[number].add(self)
        self.recorder.reserved += 64

    def capture_end(self) -> None:
        self.recorder.events.append("end")

    def replay(self) -> None:
        self.recorder.events.append("replay")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name in dir(Recorder):
        if not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, getattr(recorder, name))
    return recorder


BEFORE = ["side waits for main", "on side", "call", "the host waits for side"]
CAPTURE = ["begin in (0, 0), thread_local", "call", "end"]


def test_capture_and_replay(recorder: Recorder) -> None:
    made, collecting = CudaGraphs(CUDA), []

    def function() -> None:
        recorder.events.append("call")
        collecting.append(gc.isenabled())

    graph = made.capture(function)
    assert recorder.events == [*BEFORE, *CAPTURE, "main waits for side"]
    assert collecting == [True, False] and gc.isenabled()
    assert graph.nbytes == 64 and made.free_bytes() == 5
    graph.replay()
    assert recorder.events[-1] == "replay"


def test_a_capture_after_all_graphs_have_gone(recorder: Recorder) -> None:
    """torch refuses a pool of memory whose graphs have all gone; those that are alive share one."""
    made = CudaGraphs(CUDA)
    kept = [made.capture(lambda: None), made.capture(lambda: None)]
    kept.pop()
    kept.append(made.capture(lambda: None))
    assert len(recorder.pools) == 1
    kept.clear()
    assert made.capture(lambda: None).nbytes and len(recorder.pools) == 2


@pytest.mark.parametrize("number", [1, 2])
def test_an_error_ends_the_capture(number: int, recorder: Recorder) -> None:
    calls: list[int] = []

    def function() -> None:
        calls.append(1)
        if len(calls) == number:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CudaGraphs(CUDA).capture(function)
    assert recorder.events.count("end") == (number == 2) and gc.isenabled()


@pytest.mark.parametrize(
    ("device", "environment", "clause"),
    [
        ("cpu", "1", "the model is on cpu, and graphs are for an NVIDIA GPU"),
        ("cuda", "0", "HF_ACCEL_CUDA_GRAPHS=0 is set"),
        ("cuda", "1", None),
    ],
)
def test_refusal(device: str, environment: str, clause: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(graphs.SWITCH, environment)
    made: list[Any] = []
    monkeypatch.setattr(graphs, "CudaGraphs", made.append)
    assert refusal(torch.device(device)) == clause
    make_graphs(torch.device(device))
    assert len(made) == (clause is None)


@pytest.mark.parametrize(
    ("device", "capturable", "stock_loop", "choice", "reason"),
    [
        ("cuda", True, None, "CUDA graphs", "captured when a shape of a pass is first met"),
        ("cuda", False, None, "none", "the attention backend 'some' reads the lengths of sequences on the host"),
        ("cuda", True, "it takes no position_ids", "none", "it takes no position_ids"),
        ("mps", True, None, "none", "the model is on mps, and graphs are for an NVIDIA GPU"),
    ],
)
def test_the_plan_says_so(device: str, capturable: bool, stock_loop: str | None, choice: str, reason: str) -> None:
    planned = SimpleNamespace(backend=SimpleNamespace(name="some", capturable=capturable))
    model = SimpleNamespace(device=torch.device(device))
    form = SimpleNamespace(operators=None)
    plan: Any = SimpleNamespace(model=model, attention=[planned], form=form, stock_loop=stock_loop, agreement=ALONE)
    line = _graphs_line(plan)
    assert line.choice == choice and line.reason.startswith(reason)
