from __future__ import annotations

import random
from itertools import pairwise

import pytest

from hf_accel.generation.speculation.cost_table import CostTable, isotonic


def table_of(*observations: tuple[int, float], times: int = 3) -> CostTable:
    table = CostTable()
    for rows, seconds in observations:
        for _ in range(times):
            table.observe(rows, seconds)
    return table


def test_between_widths_it_is_linear_and_beyond_them_hopeful() -> None:
    table = table_of((1, 1.0), (3, 2.0))
    assert [table.seconds(rows) for rows in (0, 1, 2, 3)] == pytest.approx([0, 1, 1.5, 2])
    assert 2.0 < table.seconds(4) < 2.5, "it rises, but by less than it did"
    assert table_of((4, 1.0)).seconds(2) < 1.0 < table_of((4, 1.0)).seconds(6) < 1.5


def test_it_never_falls() -> None:
    dice = random.Random(0)
    table = CostTable()
    for _ in range(300):
        rows = dice.randrange(1, 200)
        table.observe(rows, (1 + 0.01 * rows) * dice.uniform(0.5, 1.5))
        curve = [table.seconds(n) for n in range(1, 300)]
        assert all(a <= b + 1e-12 for a, b in pairwise(curve))


def test_noise_and_outliers_move_it_little() -> None:
    for seed in range(20):
        dice = random.Random(seed)
        table = CostTable()
        for _ in range(200):
            seconds = 2.0 * dice.uniform(0.7, 1.3) * (10 if dice.random() < 0.03 else 1)
            table.observe(5, seconds)
        assert table.seconds(5) == pytest.approx(2.0, rel=0.15)
        assert 0.1 < table.noise < 0.25


def test_a_slow_first_pass_is_forgotten() -> None:
    table = CostTable()
    for seconds in (50.0, 1.0, 1.01):
        table.observe(1, seconds)
    assert table.seconds(1) == pytest.approx(1.01)
    table.observe(2, 40.0)  # compiled, or its memory was touched for the first time
    assert table.seconds(2) < 2.2
    for _ in range(2):
        table.observe(2, 40.0)
    assert table.seconds(2) == 40.0, "thrice is no accident"


def test_it_follows_what_changes() -> None:
    table = table_of((1, 1.0), times=50)
    for _ in range(100):
        table.observe(1, 3.0)
    assert table.seconds(1) == pytest.approx(3.0, rel=0.05)


def test_widths_are_known_from_near_ones_seen_twice() -> None:
    table = table_of((8, 1.0), times=1)
    assert not table.is_measured(8)
    table.observe(8, 1.0)
    assert [rows for rows in range(1, 40) if table.is_measured(rows)] == list(range(4, 17))


def test_doubt_shrinks_with_what_is_seen() -> None:
    few, many = table_of((1, 1.0), times=1), table_of((1, 1.0), times=20)
    assert few.uncertainty(1) > 5 * many.uncertainty(1)


def test_there_are_few_widths_to_look_after() -> None:
    table = CostTable()
    for rows in range(1, 5000):
        table.observe(rows, 1 + rows / 100)
    assert len(table.widths) < 300
    assert all(table.seconds(rows) == pytest.approx(1 + rows / 100, rel=0.05) for rows in (1, 7, 63, 100, 777, 4000))


def test_an_empty_table_says_so() -> None:
    with pytest.raises(LookupError, match="no pass"):
        CostTable().seconds(1)
    table = CostTable()
    table.observe(0, 1.0)
    table.observe(1, 0.0)
    assert table.widths == {}


def test_isotonic_regression_is_the_nearest_that_never_falls() -> None:
    assert isotonic([1.0, 3.0, 2.0, 4.0], [1, 1, 1, 1]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([3.0, 1.0], [1, 3]) == [1.5, 1.5]
    assert isotonic([3.0, 2.0, 1.0], [1, 1, 1]) == [2.0, 2.0, 2.0]
