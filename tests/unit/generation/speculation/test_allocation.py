from __future__ import annotations

import random
from itertools import accumulate, product
from operator import mul

import pytest

from hf_accel.generation.speculation.allocation import Prices, Seconds, allocate

from ..simulation import CURVES


def rate(gains: list[list[float]], lengths: tuple[int, ...], prices: Prices) -> float:
    tokens = len(gains) + sum(sum(chain[:length]) for chain, length in zip(gains, lengths, strict=True))
    return tokens / (prices.verify(len(gains) + sum(lengths)) + prices.drafting(lengths))


def every(gains: list[list[float]]) -> list[tuple[int, ...]]:
    return list(product(*(range(len(chain) + 1) for chain in gains)))


def random_gains(dice: random.Random) -> list[list[float]]:
    def chain() -> list[float]:
        return list(accumulate((dice.random() ** 0.5 for _ in range(dice.randrange(5))), mul))

    return [chain() for _ in range(dice.randrange(1, 4))]


def jagged(dice: random.Random) -> Seconds:
    """A curve that never falls, with steps of any height."""
    rises = [dice.choice([0.0, 0.0, 0.05, 0.3, 1.0]) for _ in range(400)]
    return lambda rows: 1 + sum(rises[:rows])


def test_the_choice_is_the_best_of_all() -> None:
    dice = random.Random(0)
    for _ in range(150):
        gains = random_gains(dice)
        prices = Prices(len(gains), 0, jagged(dice))
        chosen = allocate(gains, prices)
        best = max(rate(gains, lengths, prices) for lengths in every(gains))
        assert rate(gains, tuple(chosen.lengths), prices) == pytest.approx(best, rel=1e-12)
        assert chosen.rate == pytest.approx(best, rel=1e-12)


def test_the_choice_is_the_best_of_all_where_drafting_costs() -> None:
    dice = random.Random(1)
    drafted = 0
    for _ in range(150):
        gains = random_gains(dice)
        a, b = 0.2 * dice.random(), 0.1 * dice.random()
        prices = Prices(len(gains), 0, jagged(dice), lambda rows, a=a, b=b: a + b * rows)  # type: ignore[misc]
        chosen = allocate(gains, prices)
        best = max(rate(gains, lengths, prices) for lengths in every(gains))
        assert rate(gains, tuple(chosen.lengths), prices) == pytest.approx(best, rel=1e-12)
        drafted += any(chosen.lengths)
    assert 20 < drafted < 130


def test_beside_a_prefill_a_row_must_bring_tokens_as_fast_as_decoding_does() -> None:
    dice = random.Random(2)
    for _ in range(150):
        gains = random_gains(dice)
        prices = Prices(len(gains), 100, jagged(dice))
        alone = Prices(len(gains), 0, prices.verify)
        decoding = max(rate(gains, lengths, alone) for lengths in every(gains))

        def worth(lengths: tuple[int, ...]) -> float:
            tokens = sum(sum(chain[:length]) for chain, length in zip(gains, lengths, strict=True))  # noqa: B023
            return tokens - decoding * prices.extra(lengths)  # noqa: B023

        chosen = allocate(gains, prices)
        assert worth(tuple(chosen.lengths)) == pytest.approx(max(map(worth, every(gains))), abs=1e-12)


def test_a_long_prefill_does_not_make_poor_drafts_look_cheap() -> None:
    """Against 50 seconds of prefill a row of .1 s is nothing; against what decoding brings meanwhile it is not."""
    gains = [[0.05]]
    assert allocate(gains, Prices(1, 500, lambda rows: 0.9 + 0.1 * rows)).lengths == [0]
    assert allocate([[0.5]], Prices(1, 500, lambda rows: 0.9 + 0.1 * rows)).lengths == [1]


def test_rows_go_where_they_bring_most() -> None:
    gains = [[0.9, 0.81, 0.73, 0.66], [0.5, 0.25, 0.125, 0.06], [0.05, 0.0, 0.0, 0.0]]
    assert allocate(gains, Prices(3, 0, CURVES["mild"])).lengths == [4, 1, 0]
    assert allocate(gains, Prices(3, 0, CURVES["rising"])).lengths == [4, 0, 0]
    assert allocate(gains, Prices(3, 0, CURVES["steep"])).lengths == [0, 0, 0]
    assert allocate(gains, Prices(3, 0, lambda rows: 1.0)).lengths[:2] == [4, 4]


def test_extra_seconds_are_those_of_rows_and_of_drafting() -> None:
    prices = Prices(2, 3, lambda rows: float(rows * rows), lambda rows: 10.0 * rows)
    assert prices.drafting([2, 1]) == 10 * 2 + 10 * 1
    assert prices.extra([2, 1]) == 8 * 8 - 5 * 5 + 30


def test_nothing_to_draft() -> None:
    assert allocate([[], []], Prices(2, 0, CURVES["flat"])).lengths == [0, 0]
