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
from hf_accel.estimate.roofline import ByRows, Machine
from hf_accel.estimate.this_machine import (
    KEYS,
    MEASURED_ROWS,
    QUERIES,
    SEQUENCES,
    Conditions,
    Measured,
    measure_machine,
)
from hf_accel.estimate.workload import Workload
from hf_accel.kernels.cpu.float_linear import FloatLinear
from hf_accel.kernels.cpu.library import refusal
from hf_accel.linear import LinearSpec, choose
from tests.unit.linear.specs import linear_spec

from .shapes import GEMMA2_2B, TINY

SPEEDS = {torch.bfloat16: 4.0, torch.float32: 6.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reading and torch's products are not measured, and no product that was measured is kept."""
    monkeypatch.setattr(this_machine, "read_bandwidth", lambda hardware: 1e9)
    monkeypatch.setattr(this_machine, "float_peak", lambda hardware, dtype: SPEEDS[dtype])
    yield
    for measured in (this_machine._quantized, this_machine._floats, this_machine._attention):
        measured.cache_clear()


def workload(config: Any = TINY["llama"], *, weights: Any = None, dtype: torch.dtype = torch.bfloat16) -> Workload:
    return estimate(config, context=8, weights=weights, dtype=dtype, bandwidth=1.0).counted.workload


def by_rows(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> list[tuple[int, ...]]:
    """Let a product of `rows` take `seconds(rows)`, and attention none; returns the shapes of products."""
    shapes: list[tuple[int, ...]] = []

    def timed(runs: Any, inputs: Any) -> tuple[float, ...]:
        outs = [runs[-1](x) for x in inputs]
        if outs[0].ndim == 4:
            return (0.0,) * len(outs)
        shapes.extend(tuple(out.shape) for out in outs)
        return tuple(float(seconds(out.shape[0])) for out in outs)

    monkeypatch.setattr(this_machine, "_timed", timed)
    return shapes


@pytest.mark.parametrize(
    ("bits", "group", "nbytes"), [(8, None, 1 + 2 / 64), (8, 32, 1 + 2 / 32), (4, 32, 0.5 + 2 / 32)]
)
def test_the_most_frequent_matrix_is_timed_by_what_would_run(
    monkeypatch: pytest.MonkeyPatch, bits: Any, group: Any, nbytes: float
) -> None:
    shapes = by_rows(monkeypatch, lambda rows: 1e-3 * rows)
    asked: list[LinearSpec] = []
    monkeypatch.setattr(this_machine, "choose", lambda spec: (asked.append(spec), choose(spec))[1])
    config = WeightConfig(bits=bits, group_size=group)
    machine = measure_machine(workload(weights=config), "cpu")
    assert shapes == [(rows, 128) for rows in MEASURED_ROWS]  # gate and up: two of each layer
    assert [spec.device_type for spec in asked] == ["cpu"]
    assert machine.compute == 6.0 and machine.floats is None and machine.quantized is not None
    each = [1e-3 * rows / (64 * 128) for rows in MEASURED_ROWS]
    assert machine.quantized.seconds == pytest.approx([max(0.0, one - nbytes / 1e9) for one in each])


def test_a_float_model_is_timed_by_our_kernel_and_beyond_its_rows_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    if refusal() is not None:
        pytest.skip("the kernels are not built")
    ours: list[int] = []
    called = FloatLinear.__call__
    monkeypatch.setattr(FloatLinear, "__call__", lambda self, x: (ours.append(len(x)), called(self, x))[1])
    monkeypatch.setattr(this_machine, "rows_here", lambda dtype: 16)
    by_rows(monkeypatch, lambda rows: 1.0)
    machine = measure_machine(workload(), "cpu")
    assert ours == [rows for rows in MEASURED_ROWS if rows <= 16]
    assert machine.quantized is None and machine.floats is not None


@pytest.mark.parametrize(("nbytes", "count"), [(1, 1), (3 * (64 * 128 + 128 * 2), 3), (10**6, 6)])
def test_matrices_fill_the_cache_unless_the_model_is_smaller(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, count: int
) -> None:
    packed: list[Any] = []
    monkeypatch.setattr(this_machine, "choose", lambda spec: SimpleNamespace(backend=Counting(packed)))
    monkeypatch.setattr(this_machine, "_uncached_bytes", lambda hardware: nbytes)
    by_rows(monkeypatch, lambda rows: 1.0)
    measure_machine(workload(weights="int8"), "cpu")
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
    turns: list[tuple[int, int]] = []

    def least(run: Any, device: str) -> float:
        for _ in range(3):
            run()
        return float(len(turns))

    monkeypatch.setattr(this_machine, "least_seconds", least)
    runs = [lambda x, number=number: turns.append((number, len(x))) for number in range(2)]
    assert this_machine._timed(runs, [torch.ones(4), torch.ones(5)]) == (3.0, 6.0)
    assert turns == [(0, 4), (1, 4), (0, 4), (1, 5), (0, 5), (1, 5)]


def test_attention_of_the_model_s_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def timed(runs: Any, inputs: Any) -> tuple[float, ...]:
        outs = [runs[0](x) for x in inputs]
        shapes.extend(tuple(out.shape) for out in outs)
        return tuple(float(x.shape[2 if x.ndim == 4 else 0]) for x in inputs)

    monkeypatch.setattr(this_machine, "_timed", timed)
    found = measure_machine(workload(), "cpu").attention
    assert found is not None and found.rows == QUERIES
    assert shapes[: len(QUERIES)] == [(SEQUENCES, queries, 4, 16) for queries in QUERIES]
    nbytes = SEQUENCES * 2 * 2 * KEYS * 16 * 2  # K and V of two heads, in bfloat16
    one = 1.0 - nbytes / 1e9
    assert found.speed(1) == pytest.approx(4 * SEQUENCES * 4 * 16 * KEYS / one)
    pairs = sum(range(KEYS - 127, KEYS + 1))
    assert found.speed(128) == pytest.approx(4 * SEQUENCES * 4 * 16 * pairs / (128 - nbytes / 1e9))


def test_measured_once() -> None:
    spec = linear_spec(in_features=64, out_features=128, bits=8, dtype=torch.float32)
    here = Conditions(1, torch.get_num_threads())
    one = this_machine._quantized(spec, 1, here)
    assert one is this_machine._quantized(spec, 1, here)
    assert one.rows == MEASURED_ROWS and all(0 < seconds < math.inf for seconds in one.seconds)
    assert one.operations == tuple(2 * rows * 64 * 128 for rows in MEASURED_ROWS)


def test_reading_is_taken_off_and_seconds_are_of_each_weight() -> None:
    """Ten weights of which each row takes two operations."""
    found = Measured((1, 8, 16), (0.5, 31.0, 21.0), nbytes=2.0, operations=(20.0, 160.0, 320.0))
    assert found.beyond_reading(2.0) == ByRows((1, 8, 16), (0.0, 3.0, 3.0)), "more rows never take less"


@pytest.mark.parametrize(("weights", "device"), [("nf4", "cpu"), (None, "cuda:0"), ("int8", "cuda:0")])
def test_what_others_multiply_has_the_speed_of_torch_s_product(
    monkeypatch: pytest.MonkeyPatch, weights: Any, device: str
) -> None:
    by_rows(monkeypatch, pytest.fail)
    monkeypatch.setattr(this_machine, "detect", lambda device: SimpleNamespace(device=str(device)))
    monkeypatch.setattr(this_machine, "fp8_peak", lambda hardware: 7.0)
    expected = Machine(1e9, 6.0) if device == "cpu" else Machine(1e9, 4.0, fp8=7.0)
    assert measure_machine(workload(GEMMA2_2B, weights=weights), device) == expected


def test_few_rows_take_longer_than_their_share_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an estimate says of 16 sequences is what products of 16 rows took."""
    by_rows(monkeypatch, lambda rows: 1.0 if rows < 512 else 8.0)
    config = LlamaConfig(**{**TINY["llama"].to_dict(), "num_hidden_layers": 1})
    found = estimate(config, context=8, batch=16, dtype=torch.float32)
    machine = found.counted.machine
    assert machine.floats is not None
    each = 1.0 / (64 * 128)
    work = found.counted.workload.decode
    products = (work.operations - work.attention) / (2 * 16)
    assert found.seconds_per_token == pytest.approx(products * each, rel=1e-3)
