"""What of a machine is measured for a model. The clock is one of the tests'."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_accel.config import WeightConfig
from hf_accel.estimate import estimate, this_machine
from hf_accel.estimate.roofline import Machine, Products
from hf_accel.estimate.this_machine import ROWS, beyond_reading, measure
from hf_accel.estimate.workload import Workload
from hf_accel.kernels.cpu.float_linear import FloatLinear
from hf_accel.kernels.cpu.library import refusal
from hf_accel.linear import LinearSpec, choose

from .shapes import GEMMA2_2B, TINY

SPEEDS = {torch.bfloat16: 4.0, torch.float32: 6.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reading and torch's products are not measured, and no product that was measured is kept."""
    monkeypatch.setattr(this_machine, "read_bandwidth", lambda hardware: 1e9)
    monkeypatch.setattr(this_machine, "float_peak", lambda hardware, dtype: SPEEDS[dtype])
    yield
    this_machine._quantized.cache_clear()
    this_machine._floats.cache_clear()


def workload(config: Any = TINY["llama"], *, weights: Any = None, dtype: torch.dtype = torch.bfloat16) -> Workload:
    return estimate(config, context=8, weights=weights, dtype=dtype, bandwidth=1.0).counted.workload


def by_rows(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> list[tuple[int, ...]]:
    """Let a product of `rows` take `seconds(rows)`; returns the shapes of what is multiplied."""
    shapes: list[tuple[int, ...]] = []

    def least(run: Any, device: str) -> float:
        out = run()
        shapes.append(tuple(out.shape))
        return float(seconds(out.shape[0]))

    monkeypatch.setattr(this_machine, "least_seconds", least)
    return shapes


@pytest.mark.parametrize(("weights", "nbytes"), [("int8", 1 + 2 / 64), ("int4", 0.5 + 2 / 32)])
def test_the_most_frequent_matrix_is_timed_by_what_would_run(
    monkeypatch: pytest.MonkeyPatch, weights: str, nbytes: float
) -> None:
    shapes = by_rows(monkeypatch, lambda rows: 1e-3 * rows)
    asked: list[LinearSpec] = []
    monkeypatch.setattr(this_machine, "choose", lambda spec: (asked.append(spec), choose(spec))[1])
    config = WeightConfig(bits=int(weights[-1]), group_size=32)
    machine = measure(workload(weights=config), "cpu")
    assert shapes == [(rows, 128) for rows in ROWS]  # gate and up: two of each layer
    assert [spec.device_type for spec in asked] == ["cpu"]
    assert machine.compute == 6.0 and machine.floats is None and machine.quantized is not None
    each = [1e-3 * rows / (64 * 128) for rows in ROWS]
    assert machine.quantized.seconds == pytest.approx([max(0.0, one - nbytes / 1e9) for one in each])


def test_a_float_model_is_timed_by_our_kernel_and_beyond_its_rows_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    if refusal() is not None:
        pytest.skip("the kernels are not built")
    ours: list[int] = []
    called = FloatLinear.__call__
    monkeypatch.setattr(FloatLinear, "__call__", lambda self, x: (ours.append(len(x)), called(self, x))[1])
    monkeypatch.setattr(this_machine, "native_rows", lambda dtype: 16)
    by_rows(monkeypatch, lambda rows: 1.0)
    machine = measure(workload(), "cpu")
    assert ours == [rows for rows in ROWS if rows <= 16]
    assert machine.quantized is None and machine.floats is not None


def test_more_rows_never_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    by_rows(monkeypatch, lambda rows: 2.0 if rows == 8 else 1.0)
    machine = measure(workload(), "cpu")
    assert machine.floats is not None
    first, *_, last = machine.floats.seconds
    assert machine.floats.seconds[ROWS.index(8) :] == (last,) * (len(ROWS) - ROWS.index(8)) and first < last


@pytest.mark.parametrize(("nbytes", "count"), [(1, 1), (3 * (64 * 128 + 128 * 2), 3), (10**6, 6)])
def test_matrices_fill_the_cache_unless_the_model_is_smaller(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, count: int
) -> None:
    packed: list[Any] = []
    monkeypatch.setattr(this_machine, "choose", lambda spec: SimpleNamespace(backend=Counting(packed)))
    monkeypatch.setattr(this_machine, "_uncached_bytes", lambda hardware: nbytes)
    by_rows(monkeypatch, lambda rows: 1.0)
    measure(workload(weights="int8"), "cpu")
    assert len(packed) == count


class Counting:
    def __init__(self, packed: list[Any]) -> None:
        self.packed = packed

    def pack(self, weight: Any) -> Any:
        self.packed.append(weight)
        return weight

    def run(self, x: torch.Tensor, packed: Any, bias: None) -> torch.Tensor:
        return x


def test_each_matrix_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def least(run: Any, device: str) -> float:
        for _ in range(3):
            run()
        return 1.0

    monkeypatch.setattr(this_machine, "least_seconds", least)
    this_machine._timed(lambda i, x: turns.append(i), 2, (8, 8), torch.float32)
    assert turns == [0, 1] * (3 * len(ROWS) // 2) + [0] * (3 * len(ROWS) % 2)


def test_measured_once() -> None:
    spec = LinearSpec(in_features=64, out_features=128, bits=8, dtype=torch.float32)
    one = this_machine._quantized(spec, 1, 1, torch.get_num_threads())
    assert one is this_machine._quantized(spec, 1, 1, torch.get_num_threads())
    assert one.rows == ROWS and all(0 < seconds < math.inf for seconds in one.seconds)


def test_reading_is_taken_off() -> None:
    found = beyond_reading(Products((1, 16), (0.5, 3.0)), nbytes=2.0, bandwidth=2.0)
    assert found == Products((1, 16), (0.0, 2.0))


@pytest.mark.parametrize(("weights", "device"), [("nf4", "cpu"), (None, "cuda:0"), ("int8", "cuda:0")])
def test_what_others_multiply_has_the_speed_of_torch_s_product(
    monkeypatch: pytest.MonkeyPatch, weights: Any, device: str
) -> None:
    by_rows(monkeypatch, pytest.fail)
    monkeypatch.setattr(this_machine, "detect", lambda device: SimpleNamespace(device=str(device)))
    assert measure(workload(GEMMA2_2B, weights=weights), device) == Machine(1e9, 6.0 if device == "cpu" else 4.0)


def test_few_rows_take_longer_than_their_share_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an estimate says of 16 sequences is what products of 16 rows took."""
    by_rows(monkeypatch, lambda rows: 1.0 if rows < 512 else 8.0)
    config = LlamaConfig(**{**TINY["llama"].to_dict(), "num_hidden_layers": 1})
    found = estimate(config, context=8, batch=16, dtype=torch.float32)
    machine = found.counted.machine
    assert machine.floats is not None
    each = 1.0 / (64 * 128)
    products = found.counted.workload.decode.operations / (2 * 16)
    assert found.seconds_per_token == pytest.approx(products * each, rel=1e-3)
