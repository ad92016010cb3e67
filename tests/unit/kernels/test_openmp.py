"""Whose threads the kernels compute on: those of the runtime that torch has loaded, by either of its interfaces."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import CFUNCTYPE, c_int, c_int32, c_uint, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_accel.errors import HfAccelWarning
from hf_accel.kernels.cpu import library, openmp, refusal
from hf_accel.kernels.cpu.float_linear import FloatLinear
from hf_accel.kernels.cpu.integer_linear import IntegerLinear, quantize

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))

Function = CFUNCTYPE(None, c_void_p)
Outlined = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)


class Runtime:
    """The functions of a runtime of OpenMP, which computes on one thread what is for several, and notes how many."""

    def __init__(self, interface: str, *, in_parallel: bool = False) -> None:
        self.threads: list[int] = []
        parallel = CFUNCTYPE(c_int)(lambda: int(in_parallel))
        own = {
            "hfa_use_gomp": [CFUNCTYPE(None, c_void_p, c_void_p, c_uint, c_uint)(self.gomp_parallel)],
            "hfa_use_kmpc": [
                CFUNCTYPE(None, c_void_p, c_int32, c_void_p, c_void_p)(self.fork_call),
                CFUNCTYPE(None, c_void_p, c_int32, c_int32)(self.push_num_threads),
                CFUNCTYPE(c_int32, c_void_p)(lambda place: 7),
            ],
        }[interface]
        functions = dict(zip(openmp.INTERFACES[interface], [*own, parallel], strict=True))
        self.functions = SimpleNamespace(**functions)  # which would be a ctypes.CDLL

    def gomp_parallel(self, function: int, data: int, threads: int, flags: int) -> None:
        assert flags == 0
        self.threads.append(threads)
        for _ in range(threads):
            Function(function)(data)

    def push_num_threads(self, place: int, thread: int, threads: int) -> None:
        assert thread == 7
        self.threads.append(threads)

    def fork_call(self, place: int, arguments: int, outlined: int, argument: int) -> None:
        assert arguments == 1
        for _ in range(self.threads[-1]):
            Outlined(outlined)(0, 0, argument)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three of torch's. Afterwards the library has its own again."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(library, "_cores", 8)
    loaded = openmp.loaded_runtimes
    yield
    monkeypatch.setattr(openmp, "loaded_runtimes", loaded)
    assert openmp.share_threads(library._library())
    torch.set_num_threads(before)


def product() -> None:
    linear, x = FloatLinear([torch.ones(1000, 8)], [None]), torch.ones(4, 8)
    assert (linear(x) == 8).all()


@pytest.mark.parametrize("interface", openmp.INTERFACES)
def test_either_interface(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(interface)
    nothing: Any = SimpleNamespace()
    monkeypatch.setattr(openmp, "loaded_runtimes", lambda: [nothing, runtime.functions])
    assert openmp.share_threads(library._library())
    product()
    assert runtime.threads and set(runtime.threads) == {3}


def test_few_tasks_have_a_whole_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine rows are quantized by two threads. A team of two would end the third one, and the next starts it again."""
    runtime = Runtime("hfa_use_gomp")
    monkeypatch.setattr(openmp, "loaded_runtimes", lambda: [runtime.functions])
    assert openmp.share_threads(library._library())
    found = quantize(8, torch.ones(1000, 8), 8)
    assert found is not None
    torch.testing.assert_close(IntegerLinear([found[0]], [None])(torch.ones(9, 8)), torch.full((9, 1000), 8.0))
    assert runtime.threads[-2:] == [3, 3] and set(runtime.threads) == {3}


@pytest.mark.parametrize("interface", openmp.INTERFACES)
def test_within_a_team_the_caller_computes_alone(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(interface, in_parallel=True)
    monkeypatch.setattr(openmp, "loaded_runtimes", lambda: [runtime.functions])
    assert openmp.share_threads(library._library())
    product()
    assert runtime.threads == []


def test_half_an_interface_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime("hfa_use_kmpc")
    del runtime.functions.omp_in_parallel
    monkeypatch.setattr(openmp, "loaded_runtimes", lambda: [runtime.functions])
    assert not openmp.share_threads(library._library())


def test_torchs_runtime_is_found_and_not_loaded_again() -> None:
    """In the files next to torch too, for a system on which torch's libraries have no common names."""
    everything, *files = openmp.loaded_runtimes()
    assert everything._name is None
    bundled = list((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if bundled:
        address = ctypes.cast(everything.GOMP_parallel, c_void_p).value
        assert [ctypes.cast(each.GOMP_parallel, c_void_p).value for each in files] == [address] * len(files) and files


def test_without_threads_the_caller_computes_and_the_user_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "loaded_runtimes", list)
    monkeypatch.setattr(library, "_shares_threads", True)
    library._library.__wrapped__()
    assert library.threads() == 1
    product()
    with pytest.warns(HfAccelWarning, match="they compute on one thread, because this torch has loaded no OpenMP"):
        library.warn_of_refusal.__wrapped__()
    torch.set_num_threads(1)
    library.warn_of_refusal.__wrapped__()  # nobody asked for more
