from __future__ import annotations

import pytest
import torch

from hf_accel.estimate import roofline
from hf_accel.estimate.roofline import Machine, Work


@pytest.mark.parametrize(
    ("nbytes", "operations", "seconds", "bound"),
    [(100, 1000, 10.0, "memory"), (100, 4000, 20.0, "compute"), (100, 2000, 10.0, "memory")],
)
def test_the_slower_of_the_two_sets_the_time(nbytes, operations, seconds, bound):
    machine = Machine(bandwidth=10, compute=200)
    assert machine.seconds(Work(nbytes, operations)) == seconds
    assert machine.bound(Work(nbytes, operations)) == bound


@pytest.mark.parametrize(
    ("given", "machine"),
    [
        ({"bandwidth": 5.0, "compute": 7.0}, (5.0, 7.0)),
        ({"bandwidth": 5.0, "compute": None}, (5.0, 500.0)),
        ({"bandwidth": None, "compute": 500.0}, (5.0, 500.0)),
        ({"bandwidth": None, "compute": None}, (3.0, 4.0)),
    ],
)
def test_only_a_machine_of_which_nothing_is_known_is_measured(monkeypatch, given, machine):
    monkeypatch.setattr(roofline, "detect", lambda device: device)
    monkeypatch.setattr(roofline, "read_bandwidth", {"here": 3.0}.__getitem__)
    monkeypatch.setattr(roofline, "float_peak", lambda hardware, dtype: {("here", torch.half): 4.0}[hardware, dtype])
    assert Machine.of(**given, dtype=torch.half, device="here") == machine
