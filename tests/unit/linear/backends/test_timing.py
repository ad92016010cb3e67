from __future__ import annotations

import pytest
import torch

from hf_accel.hardware import device
from hf_accel.linear import choose
from hf_accel.linear.backends import registry as module
from hf_accel.linear.backends.reference import REFERENCES, Reference
from hf_accel.linear.backends.registry import measure

from ..specs import linear_spec


class Slow(Reference):
    """Takes 1 second more for every 64 outputs, on a clock of its own."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__(None)
        self.clock = clock

    def run(self, x, packed, bias):
        assert x.shape == (1, packed.shape[1])
        self.clock[0] += packed.shape[0] / 64
        return super().run(x, packed, bias)


@pytest.mark.parametrize(("outputs", "seconds"), [(64, 1.0), (640, 10.0), (6400, 100.0)])
def test_a_large_layer_is_measured_in_part(monkeypatch, outputs, seconds):
    clock = [0.0]
    monkeypatch.setattr(device.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(module, "TIMED", 64 * 256 * 2)
    spec = linear_spec(in_features=256, out_features=outputs, bits=8, dtype=torch.float32)
    assert measure(spec, Slow(clock)) == (0.0, seconds)


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.bfloat16), (8, torch.float32), (4, torch.bfloat16)])
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 96), (33, 128), (80, 128), (208, 128)])
def test_every_choice_can_be_measured(monkeypatch, bits, dtype, outputs, inputs):
    monkeypatch.setattr(module, "TIMED", 100 * 128)
    spec = linear_spec(in_features=inputs, out_features=outputs, bits=bits, group_size=32, dtype=dtype)
    stock, chosen = measure(spec, choose(spec).backend)
    assert 0 < stock < 1
    assert 0 < chosen < 1


@pytest.mark.parametrize("bits", [4, 2])
def test_a_weight_with_zero_points_can_be_measured(bits):
    """Zero points lie one group after the other: they are written with strides."""
    spec = linear_spec(in_features=128, out_features=48, bits=bits, symmetric=False, dtype=torch.float32)
    assert min(measure(spec, choose(spec).backend)) > 0


def test_measured_once():
    spec = linear_spec(in_features=32, out_features=48, bits=8, dtype=torch.float32)
    assert measure(spec, REFERENCES[None]) is measure(spec, REFERENCES[None])
