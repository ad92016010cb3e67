from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from hf_accel.hardware import bandwidth_here, detect, device, float_peak, read_bandwidth

MIB = 2**20
CPU = dataclasses.replace(detect(), l2_bytes=MIB, l3_bytes=32 * MIB, free_memory=10**12)


@pytest.fixture(autouse=True)
def forget():
    for cached in (device._read_bandwidth, device._float_peak, bandwidth_here):
        cached.cache_clear()
    yield
    for cached in (device._read_bandwidth, device._float_peak, bandwidth_here):
        cached.cache_clear()


@pytest.fixture
def clock(monkeypatch):
    """Every measurement takes these seconds; the calls are counted."""
    calls = []

    def fake(run, device):
        run()
        calls.append(device)
        return fake.seconds

    monkeypatch.setattr(device, "least_seconds", fake)
    fake.calls, fake.seconds = calls, 0.25
    return fake


def test_bandwidth_is_bytes_over_the_least_time(clock):
    assert read_bandwidth(CPU) == 256 * MIB / 0.25


def test_bandwidth_is_measured_once_per_thread_count(clock, monkeypatch):
    threads = torch.get_num_threads()
    read_bandwidth(CPU)
    read_bandwidth(dataclasses.replace(CPU, free_memory=CPU.free_memory - 4096))
    assert len(clock.calls) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    read_bandwidth(CPU)
    assert len(clock.calls) == 2


def test_a_plan_asks_the_machine_once_per_thread_count(clock, monkeypatch):
    """Another number of threads reads at another speed, whatever was measured before."""
    asked = []
    monkeypatch.setattr(device, "detect", lambda name: asked.append(name) or CPU)
    assert [bandwidth_here("cpu", 1) for _ in range(3)] == [256 * MIB / 0.25] * 3
    assert asked == ["cpu"] and len(clock.calls) == 1
    clock.seconds = 0.5
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert bandwidth_here("cpu", 2) == 256 * MIB / 0.5
    assert bandwidth_here("cpu", 1) == 256 * MIB / 0.25
    assert len(asked) == len(clock.calls) == 2


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 256 * MIB),
        ({"l3_bytes": None}, 64 * MIB),
        ({"l3_bytes": 10**12}, 1024 * MIB),
        ({"free_memory": 40 * MIB}, 10 * MIB),
        ({"free_memory": None}, 64 * MIB),
        ({"compute_capability": (9, 0)}, 1024 * MIB),
    ],
)
def test_the_buffer_is_larger_than_the_last_cache_but_leaves_memory_free(changes, size):
    assert device._buffer_bytes(dataclasses.replace(CPU, **changes)) == size


def test_a_peak_is_two_operations_per_multiply_add_at_the_best_time(clock):
    assert float_peak(CPU, torch.float32) == 2 * 512**3 / 0.25
    calls = len(clock.calls)
    assert float_peak(CPU) == float_peak(CPU, torch.float32)
    assert len(clock.calls) == calls


def test_a_quick_matmul_is_measured_at_the_larger_size_too(monkeypatch):
    monkeypatch.setattr(device, "least_seconds", lambda run, device: 0.02)
    assert float_peak(CPU) == 2 * 1024**3 / 0.02


@pytest.mark.parametrize(("duration", "times"), [(0.001, 7), (0.02, 3), (0.03, 2), (1.0, 2)])
def test_the_first_call_warms_up_and_slow_ones_are_few(monkeypatch, duration, times):
    now = [0.0]
    calls = []

    def run():
        now[0] += duration if calls else duration / 2  # the first would be the least
        calls.append(None)

    monkeypatch.setattr(device.time, "perf_counter", lambda: now[0])
    assert device.least_seconds(run, "cpu") == pytest.approx(duration)
    assert len(calls) == 1 + times


def test_real_measurements_are_plausible_and_quick():
    start = time.perf_counter()
    bandwidth, floats = read_bandwidth(detect()), float_peak(detect())
    assert time.perf_counter() - start < 20
    assert 1e8 < bandwidth < 1e13
    assert 1e8 < floats < 1e15
