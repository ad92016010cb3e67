from __future__ import annotations

from types import SimpleNamespace

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
    assert machine.seconds_in_turn(Work(nbytes, operations)) == nbytes / 10 + operations / 200


def test_products_of_integers_have_a_speed_of_their_own():
    work = Work(nbytes=0, operations=3000, integers=2000)
    assert Machine(bandwidth=10, compute=200, integers=400).seconds(work) == 1000 / 200 + 2000 / 400
    assert Machine(bandwidth=10, compute=200).seconds(work) == 3000 / 200


def test_products_of_fp8_have_one_too():
    work = Work(nbytes=0, operations=3000, integers=1000, fp8=1500)
    assert Machine(bandwidth=10, compute=200, fp8=400).seconds(work) == 1500 / 200 + 1500 / 400
    assert Machine(bandwidth=10, compute=200).seconds(work) == 3000 / 200


@pytest.mark.parametrize(
    ("given", "machine"),
    [
        ({"bandwidth": 5.0, "compute": 7.0}, (5.0, 7.0, 0.0, 0.0)),
        ({"bandwidth": 5.0, "compute": 7.0, "compute_fp8": 11.0}, (5.0, 7.0, 0.0, 11.0)),
        ({"bandwidth": 5.0, "compute": None}, (5.0, 500.0, 0.0, 0.0)),
        ({"bandwidth": None, "compute": 500.0}, (5.0, 500.0, 0.0, 0.0)),
        ({"bandwidth": None, "compute": None}, (3.0, 4.0, 0.0, 9.0)),
    ],
)
def test_only_a_machine_of_which_nothing_is_known_is_measured(monkeypatch, given, machine):
    speeds = {torch.half: 4.0, torch.float: 6.0}
    monkeypatch.setattr(roofline, "detect", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(roofline, "read_bandwidth", lambda hardware: 3.0)
    monkeypatch.setattr(roofline, "float_peak", lambda hardware, dtype: speeds[dtype])
    monkeypatch.setattr(roofline, "integer_peak", lambda device: 8.0)
    monkeypatch.setattr(roofline, "fp8_peak", lambda hardware: 9.0)
    assert Machine.of(**given, dtype=torch.half, device="cuda:0") == machine
    if given["bandwidth"] is given["compute"] is None:  # a CPU may have no half precision
        assert Machine.of(**given, dtype=torch.half, device="cpu") == (3.0, 6.0, 8.0, 0.0)
