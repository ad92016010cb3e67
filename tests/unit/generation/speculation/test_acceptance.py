from __future__ import annotations

import pytest

from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.acceptance import Tally, gains
from hf_accel.generation.speculation.draft_sources import (
    WEIGHT,
    Drafted,
    DraftSource,
    expected_gains,
    hoped_rate,
    hoped_trees,
)
from hf_accel.generation.speculation.drafters.drafter import UNKNOWN


def of_source(source: DraftSource, count: int) -> list[float]:
    return source.tally.acceptances([UNKNOWN, *[None] * (count - 1)], WEIGHT)


def observe(source: DraftSource, drafted: int, accepted: int, *, times: int = 1, one: Drafted | None = None) -> None:
    for _ in range(times):
        source.tally.add(drafted, accepted)
        if one is not None:
            one.tally.add(drafted, accepted)


def test_counts_by_position() -> None:
    tally = Tally()
    for drafted, accepted in [(3, 3), (3, 1), (2, 0), (0, 0), (4, 2)] * 100:
        tally.add(drafted, accepted)
    assert tally.drafted == [400, 400, 300, 100]
    assert tally.verified == [400, 300, 200, 0]
    assert tally.accepted == [300, 200, 100, 0]
    rates = tally.acceptances([None] * 5, 4.0)
    assert rates[0] == 0.75
    assert rates[1:3] == pytest.approx([2 / 3, 0.5], abs=0.01)
    assert rates[3] == rates[4] == rates[2], "nothing is known of them: they are like the one before"
    assert Tally().acceptances([None] * 2, 4.0) == [0.0, 0.0]


def test_one_verified_token_does_not_make_a_rate() -> None:
    tally = Tally()
    for _ in range(100):
        tally.add(1, 0)
    tally.add(2, 2)
    assert tally.acceptances([None, None], 4.0)[1] < 0.25


def test_acceptances_may_differ_by_position() -> None:
    assert gains([0.5, 0.8, 1.0]) == pytest.approx([0.5, 0.4, 0.4])
    assert gains([]) == []


def test_nothing_known() -> None:
    assert of_source(DraftSource(), 3) == [UNKNOWN] * 3


def test_positions_after_the_first_rejected_one_are_no_evidence() -> None:
    source = DraftSource()
    observe(source, 4, 1, times=50)
    first, second, third, fourth = of_source(source, 4)
    assert first > 0.9 and second < 0.1
    assert source.tally.verified[2:] == [0, 0]
    assert third == fourth == second, "like the one before, as nothing is known of them"


def test_a_position_that_was_never_drafted_does_not_count_as_never_accepted() -> None:
    source = DraftSource()
    observe(source, 2, 2, times=100)
    assert all(rate > 0.9 for rate in of_source(source, 8))
    [chain] = expected_gains(source, [Drafted()], [8])
    assert chain == pytest.approx(gains(of_source(source, 8)))


def test_positions_have_acceptances_of_their_own() -> None:
    source = DraftSource()
    for i in range(200):  # a lookup is wrong at once or goes on for long
        observe(source, 5, 5 if i % 2 else 0)
    assert of_source(source, 5) == pytest.approx([0.5, 1, 1, 1, 1], abs=0.1)


def test_a_sequence_begins_with_what_others_showed_and_goes_its_own_way() -> None:
    source, sequence = DraftSource(), Drafted()
    observe(source, 1, 0, times=100)
    assert expected_gains(source, [sequence], [1])[0][0] < 0.05
    observe(source, 1, 1, times=8, one=sequence)
    own, other = expected_gains(source, [sequence, Drafted()], [1, 1])
    assert own[0] > 0.6 and other[0] < 0.2


def test_what_is_long_ago_counts_little() -> None:
    source, sequence = DraftSource(), Drafted()
    observe(source, 1, 0, times=1000, one=sequence)
    observe(source, 1, 1, times=12, one=sequence)
    assert expected_gains(source, [sequence], [1])[0][0] > 0.45


def test_positions_that_are_drafted_no_more_are_forgotten() -> None:
    source = DraftSource()
    observe(source, 3, 1, times=100)
    low = of_source(source, 3)[1]
    observe(source, 1, 1, times=200)
    assert low < 0.1 and of_source(source, 3)[1] > 0.5, "what was seen of it is long ago"


def test_what_is_possible_is_more_than_what_is_expected_and_less_the_more_is_seen() -> None:
    source, before = DraftSource(), 1.0
    assert hoped_rate(source) > 0.6
    for _ in range(6):
        observe(source, 1, 0, times=4)
        assert of_source(source, 1)[0] < hoped_rate(source) < before
        before = hoped_rate(source)
    assert hoped_trees(source, [2, 0])[1] == []
    assert [depth for _, depth in hoped_trees(source, [2, 0])[0]] == [0, 1]


def test_a_sequence_that_waits_becomes_like_the_others_again() -> None:
    source, sequence = DraftSource(), Sequence([1], RequestSettings(9, sampling=None))
    one = source.at(sequence, 1)
    observe(source, 1, 1, times=40)
    one.tally.add(1, 0)
    for _ in range(20):
        one.tally.add(1, 0)
    assert expected_gains(source, [one], [1])[0][0] < 0.3
    assert expected_gains(source, [source.at(sequence, 400)], [1])[0][0] > 0.8
