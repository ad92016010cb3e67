from __future__ import annotations

import json

import pytest

from hf_accel.generation.speculation.statistics import SpeculationStatistics


def of(*steps: tuple[int, int]) -> SpeculationStatistics:
    statistics = SpeculationStatistics()
    for drafted, accepted in steps:
        statistics.record_step(drafted, accepted)
    statistics.record_pass(drafting_seconds=0.25, verifying_seconds=1.0)
    return statistics


def test_counts_by_position() -> None:
    found = of((3, 1), (3, 3), (1, 0), (0, 0)).to_dict()
    assert found == {
        "passes": 1,
        "steps": 4,
        "tokens": 8,
        "tokens_per_pass": 2.0,
        "drafted": 7,
        "accepted": 4,
        "acceptance": 4 / 7,
        "drafted_at": [3, 2, 2],
        "accepted_at": [2, 1, 1],
        "acceptance_at": [2 / 3, 0.5, 0.5],
        "draft_lengths": {"0": 1, "1": 1, "3": 2},
        "drafting_seconds": 0.25,
        "verifying_seconds": 1.0,
    }


def test_merging_is_like_having_seen_both() -> None:
    first, second = [(2, 1), (0, 0)], [(4, 4), (1, 0), (3, 0)]
    a, b = of(*first), of(*second)
    merged, both = a.merge(b), of(*first, *second)
    both.record_pass(drafting_seconds=0.25, verifying_seconds=1.0)
    assert merged == both
    assert (a, b) == (of(*first), of(*second)), "neither is changed"
    assert a.merge(SpeculationStatistics()) == a


def test_nothing_is_json_too() -> None:
    for statistics in (SpeculationStatistics(), of((3, 0)), of((0, 0))):
        assert json.loads(json.dumps(statistics.to_dict())) == statistics.to_dict()
    assert SpeculationStatistics().to_dict()["acceptance"] is None
    assert of((3, 0)).to_dict()["accepted_at"] == [0, 0, 0]


def test_a_stop_within_the_accepted_tokens_counts_what_stayed() -> None:
    statistics = SpeculationStatistics()
    statistics.record_step(4, 4, tokens=2)
    assert statistics.tokens_per_pass == 2 and statistics.accepted == 4


def test_more_accepted_than_drafted_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 tokens accepted of 2"):
        SpeculationStatistics().record_step(2, 3)
