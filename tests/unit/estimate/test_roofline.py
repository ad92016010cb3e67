from __future__ import annotations

import math

import pytest

from hf_accel.estimate.roofline import ByRows, Machine, Work

PRODUCTS = ByRows(rows=(1, 4, 16), seconds=(0.0, 0.3, 2.7))


@pytest.mark.parametrize(
    ("nbytes", "operations", "seconds", "bound"),
    [(100, 1000, 10.0, "memory"), (100, 4000, 20.0, "compute"), (100, 2000, 10.0, "memory")],
)
def test_the_slower_of_the_two_sets_the_time(nbytes, operations, seconds, bound):
    machine = Machine(bandwidth=10, compute=200)
    assert machine.seconds(Work(nbytes, operations)) == seconds
    assert machine.bound(Work(nbytes, operations)) == bound
    assert machine.seconds_in_turn(Work(nbytes, operations)) == nbytes / 10 + operations / 200


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [(1, 0.0), (0.5, 0.0), (2, 0.1), (4, 0.3), (10, 1.5), (16, 2.7), (32, 5.4), (1600, 270.0)],
)
def test_seconds_of_products_between_and_beyond_those_that_were_measured(rows, seconds):
    speed = PRODUCTS.speed(rows)
    assert speed == pytest.approx(2 * rows / seconds) if seconds else speed == math.inf


def test_no_rows_are_many():
    assert PRODUCTS.speed(0) == PRODUCTS.speed(16) == PRODUCTS.speed(160) == pytest.approx(32 / 2.7)
    assert ByRows((1,), (0.5,)).speed(7) == 4.0  # one speed for any number


def test_products_that_were_measured_have_speeds_of_their_own():
    work = Work(nbytes=100, operations=3000, quantized=2000, rows=4)
    fast = 2 * 4 / 0.3
    assert Machine(10, 200, quantized=PRODUCTS).computing(work) == pytest.approx(1000 / 200 + 2000 / fast)
    assert Machine(10, 200, floats=PRODUCTS).computing(work) == pytest.approx(1000 / fast + 2000 / 200)
    assert Machine(10, 200).computing(work) == 3000 / 200
    attending = work._replace(attention=500.0, queries=16)
    expected = 500 / 200 + 500 / (2 * 16 / 2.7) + 2000 / 200
    assert Machine(10, 200, attention=PRODUCTS).computing(attending) == pytest.approx(expected)
    assert Machine(10, 200).computing(attending) == 3000 / 200


def test_products_of_fp8_have_one_where_nothing_was_measured():
    work = Work(nbytes=0, operations=3000, quantized=2500, fp8=1500, rows=4)
    assert Machine(10, 200, fp8=400).computing(work) == 1500 / 200 + 1500 / 400
    assert Machine(10, 200).computing(work) == 3000 / 200
    measured = Machine(10, 200, quantized=PRODUCTS)
    assert measured._replace(fp8=400.0).computing(work) == measured.computing(work)


def test_a_pass_and_its_layers_take_more_than_their_kernels():
    work = Work(nbytes=100, operations=3000, rows=4, layers=5)
    machine = Machine(10, 200, floats=PRODUCTS)
    slower = machine._replace(pass_seconds=2.0, layer_seconds=0.5)
    assert slower.around(work) == 4.5 and machine.around(work) == 0.0
    assert slower.seconds(work) == machine.seconds(work) + 4.5


def test_what_was_measured_is_an_estimate_and_no_limit():
    work = Work(nbytes=100, operations=3000, quantized=2000, rows=4)
    assert Machine(10, 200).seconds(work) == 15.0
    for machine in (Machine(10, 200, quantized=PRODUCTS), Machine(10, 200, floats=PRODUCTS)):
        assert machine.seconds(work) == machine.seconds_in_turn(work) == 10.0 + machine.computing(work)


@pytest.mark.parametrize(
    ("bandwidth", "compute", "machine"),
    [(5.0, 7.0, (5.0, 7.0)), (5.0, None, (5.0, 500.0)), (None, 500.0, (5.0, 500.0))],
)
def test_one_number_gives_the_other(bandwidth, compute, machine):
    assert Machine.given(bandwidth=bandwidth, compute=compute) == Machine(*machine)
    assert Machine.given(bandwidth=bandwidth, compute=compute, compute_fp8=9.0) == Machine(*machine, fp8=9.0)
