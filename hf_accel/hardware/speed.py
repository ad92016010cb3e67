"""The speed of torch on this machine, with its current threads. It is measured at the first question, once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from .device import Hardware
from .memory import large_pages

MIB = 2**20


def read_bandwidth(hardware: Hardware) -> float:
    """Return the bytes per second at which torch's current threads read memory that no cache holds; measured once."""
    return _read_bandwidth(hardware.device, _buffer_bytes(hardware), torch.get_num_threads())


def float_peak(hardware: Hardware, dtype: torch.dtype = torch.float32) -> float:
    """Return operations (two per multiply-add) per second of torch's matmul in `dtype`; measured once per thread
    count.
    """
    return _float_peak(hardware.device, dtype, torch.get_num_threads())


def fp8_peak(hardware: Hardware) -> float | None:
    """Return operations per second of torch's product of FP8 matrices, None where it has none; measured once."""
    return _fp8_peak(hardware.device)


@lru_cache
def _fp8_peak(device: str) -> float | None:
    def build(size: int) -> Callable[[], Tensor]:
        matrix, one = torch.ones(size, size, device=device).to(torch.float8_e4m3fn), torch.ones((), device=device)
        return lambda: torch._scaled_mm(matrix, matrix.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        return matmul_peak(build, device)
    except (AttributeError, NotImplementedError, RuntimeError):  # this GPU or this build of torch lacks it
        return None


@lru_cache
def _read_bandwidth(device: str, nbytes: int, threads: int) -> float:
    # In large pages, as packed weights are; ones, because pages of zeros may be one page.
    buffer = large_pages(torch.empty(nbytes // 4, dtype=torch.float32, device=device)).fill_(1)
    return buffer.nbytes / least_seconds(buffer.sum, device)


def _buffer_bytes(hardware: Hardware) -> int:
    """Return eight times the size of the last cache, so that it holds little of the buffer from the pass before."""
    wanted = 8 * (hardware.l3_bytes or hardware.l2_bytes or 16 * MIB)
    if hardware.compute_capability:
        wanted = 1024 * MIB
    return min(max(wanted, 64 * MIB), 1024 * MIB, (hardware.free_memory or 256 * MIB) // 4)


@lru_cache
def _float_peak(device: str, dtype: torch.dtype, threads: int) -> float:
    def build(size: int) -> Callable[[], Tensor]:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        return lambda: matrix @ matrix

    return matmul_peak(build, device)


def matmul_peak(build: Callable[[int], Callable[[], Tensor]], device: str) -> float:
    """Return operations per second of the square matmul that `build(size)` prepares, the better of two sizes."""
    peak = 0.0
    for size in (512, 1024) if device == "cpu" else (2048, 8192):
        seconds = least_seconds(build(size), device)
        peak = max(peak, 2 * size**3 / seconds)
        if seconds > 0.03:  # a dtype that this machine emulates: the larger size would take a second
            break
    return peak


def least_seconds(run: Callable[[], object], device: str) -> float:
    """Return the least wall time of a call of `run`, after one to warm up: of two calls, or of up to 7 in 50 ms."""
    seconds: list[float] = []
    while len(seconds) < 3 or (len(seconds) < 8 and sum(seconds[1:]) < 0.05):
        start = time.perf_counter()
        run()
        if device != "cpu":  # a GPU runs on after the call
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
