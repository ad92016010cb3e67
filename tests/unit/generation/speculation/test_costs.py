from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise, product
from operator import mul

import pytest

from hf_accel.generation.speculation.costs import (
    FIRST_ADDED,
    CostTable,
    DraftCost,
    DraftSeconds,
    Seconds,
    allocate,
    allocate_trees,
    isotonic,
)

from ..simulation import CURVES

# -- seconds of a pass -------------------------------------------------------------------------------------


def table_of(*observations: tuple[int, float], times: int = 3) -> CostTable:
    table = CostTable()
    for rows, seconds in observations:
        for _ in range(times):
            table.observe(rows, seconds)
    return table


def test_between_widths_it_is_linear_and_beyond_them_hopeful() -> None:
    table = table_of((1, 1.0), (3, 2.0))
    assert [table.seconds(rows) for rows in (1, 2, 3)] == pytest.approx([1, 1.5, 2])
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
        assert 0.01 < table.doubt(5) / 2.0 < 0.05


def test_a_width_takes_what_it_took_lately() -> None:
    table = table_of((1, 1.0), times=40)
    for _ in range(100):
        table.observe(9, 3.0)
    for _ in range(4):
        table.observe(1, 2.0)  # the machine is slower now
    assert table.seconds(1) == pytest.approx(2.0)


def test_passes_get_wider_step_by_step() -> None:
    table = table_of((32, 12.0), (4096, 700.0))
    steps = []
    for _ in range(5):
        steps.append(table.step(32, 29))
        table.observe(32 + steps[-1], 15.0)
    assert steps == [FIRST_ADDED, 8, 16, 29, 29]
    assert table.step(32, 3) == 3 and table.step(16, 100) == 90, "as many as another batch has had, twice"


def test_no_more_tokens_are_drafted_than_there_is_room_for() -> None:
    gains = [[(0.9, 0), (0.81, 1)], [(0.5, 0), (0.25, 1)], [(0.8, 0), (0.64, 1)]]
    for room in (0, 1, 2, 3, None):
        shapes, _ = allocate_trees(gains, lambda rows: 1 + 0.001 * rows, room=room)
        assert [shape.nodes for shape in shapes] == {
            0: [0, 0, 0], 1: [1, 0, 0], 2: [2, 0, 0], 3: [2, 0, 1], None: [2, 2, 2],
        }[room]  # fmt: skip


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
    slope = 0.02
    assert few.extra(1, 1) - slope > 4 * (many.extra(1, 1) - slope) > 0


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


# -- draft lengths -----------------------------------------------------------------------------------------


def tokens_of(gains: list[list[float]], lengths: Sequence[int]) -> float:
    return sum(sum(chain[:length]) for chain, length in zip(gains, lengths, strict=True))


def drafting(lengths: Sequence[int], draft: DraftSeconds) -> float:
    return draft(max(lengths), sum(lengths)) if any(lengths) else 0.0


def rate(
    gains: list[list[float]], lengths: Sequence[int], verify: Seconds, draft: DraftSeconds = lambda levels, tokens: 0.0
) -> float:
    seconds = verify(len(gains) + sum(lengths)) + drafting(lengths, draft)
    return (len(gains) + tokens_of(gains, lengths)) / seconds


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
        gains, verify = random_gains(dice), jagged(dice)
        best = max(rate(gains, lengths, verify) for lengths in every(gains))
        assert rate(gains, allocate(gains, verify), verify) == pytest.approx(best, rel=1e-12)


def test_the_choice_is_the_best_of_all_where_drafting_costs() -> None:
    dice = random.Random(1)
    drafted = 0
    for _ in range(150):
        gains, verify = random_gains(dice), jagged(dice)
        parts = [0.2 * dice.random(), 0.2 * dice.random(), 0.1 * dice.random()]
        draft = partial(
            lambda levels, tokens, a, b, c: a + b * levels + c * tokens, **dict(zip("abc", parts, strict=True))
        )
        chosen = allocate(gains, verify, draft)
        best = max(rate(gains, lengths, verify, draft) for lengths in every(gains))
        assert rate(gains, chosen, verify, draft) == pytest.approx(best, rel=1e-12)
        drafted += any(chosen)
    assert 20 < drafted < 130


def test_beside_a_prefill_a_row_must_bring_tokens_as_fast_as_decoding_does() -> None:
    dice = random.Random(2)
    for _ in range(150):
        gains, verify = random_gains(dice), jagged(dice)
        decoding = max(rate(gains, lengths, verify) for lengths in every(gains))
        rows = len(gains) + 100

        def worth(lengths: Sequence[int]) -> float:
            extra = verify(rows + sum(lengths)) - verify(rows)  # noqa: B023
            return tokens_of(gains, lengths) - decoding * extra  # noqa: B023

        chosen = allocate(gains, verify, other_rows=100)
        assert worth(chosen) == pytest.approx(max(map(worth, every(gains))), abs=1e-12)


def test_a_long_prefill_does_not_make_poor_drafts_look_cheap() -> None:
    """Against 50 seconds of prefill a row of .1 s is nothing; against what decoding brings meanwhile it is not."""
    gains = [[0.05]]
    assert allocate(gains, CURVES["mild"], other_rows=500) == [0]
    assert allocate([[0.5]], CURVES["mild"], other_rows=500) == [1]


def test_rows_go_where_they_bring_most() -> None:
    gains = [[0.9, 0.81, 0.73, 0.66], [0.5, 0.25, 0.125, 0.06], [0.05, 0.0, 0.0, 0.0]]
    assert allocate(gains, CURVES["mild"]) == [4, 1, 0]
    assert allocate(gains, CURVES["rising"]) == [4, 0, 0]
    assert allocate(gains, CURVES["steep"]) == [0, 0, 0]
    assert allocate(gains, lambda rows: 1.0)[:2] == [4, 4]


def test_nothing_to_draft() -> None:
    assert allocate([[], []], CURVES["flat"]) == [0, 0]


def test_what_drafts_cost_is_told_apart_by_call_level_and_token() -> None:
    cost = DraftCost()
    cost.observe(1, 1, 9.0)  # as slow as a first call can be
    for levels, tokens in [(1, 1), (2, 2), (3, 3), (1, 4), (3, 12), (3, 8)] * 20:
        cost.observe(levels, tokens, 0.6 + 0.2 * levels + 0.05 * tokens)
    cost.observe(1, 1, 100.0)  # an outlier
    for levels, tokens in [(1, 1), (3, 3), (6, 6), (3, 12)]:
        assert cost.seconds(levels, tokens) == pytest.approx(0.6 + 0.2 * levels + 0.05 * tokens, rel=0.1)
