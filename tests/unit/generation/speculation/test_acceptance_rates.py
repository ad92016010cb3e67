from __future__ import annotations

import pytest

from hf_accel.generation.speculation.acceptance_rates import PRIOR_ACCEPTANCE, SequenceRates, SourceRates


def test_nothing_known() -> None:
    assert SourceRates().acceptances(3) == [PRIOR_ACCEPTANCE] * 3
    assert SourceRates().longest_draft == 1


def test_positions_after_the_first_rejected_one_are_no_evidence() -> None:
    source = SourceRates()
    for _ in range(50):
        source.observe(4, 1)
    first, second, third, fourth = source.acceptances(4)
    assert first > 0.95 and second < 0.05
    assert source.tally.at(2) == (0.0, 0.0)
    assert third == fourth == second, "like the one before, as nothing is known of them"


def test_a_position_that_was_never_drafted_does_not_count_as_never_accepted() -> None:
    source = SourceRates()
    for _ in range(100):
        source.observe(2, 2)
    assert all(rate > 0.95 for rate in source.acceptances(8))
    assert source.longest_draft == 4
    assert SequenceRates(source).acceptances(source.acceptances(8)) == pytest.approx(source.acceptances(8), abs=0.01)


def test_positions_have_acceptances_of_their_own() -> None:
    source = SourceRates()
    for i in range(200):  # a lookup is wrong at once or goes on for long
        source.observe(5, 5 if i % 2 else 0)
    assert source.acceptances(5) == pytest.approx([0.5, 1, 1, 1, 1], abs=0.03)


def test_a_sequence_begins_with_what_others_showed_and_goes_its_own_way() -> None:
    source = SourceRates()
    for _ in range(100):
        source.observe(1, 0)
    sequence = SequenceRates(source)
    assert sequence.acceptances(source.acceptances(1))[0] < 0.05
    for _ in range(8):
        sequence.observe(1, 1)
    assert sequence.acceptances(source.acceptances(1))[0] > 0.6
    assert SequenceRates(source).acceptances(source.acceptances(1))[0] < 0.2


def test_what_is_long_ago_counts_little() -> None:
    sequence = SequenceRates(SourceRates())
    for _ in range(1000):
        sequence.observe(1, 0)
    for _ in range(12):
        sequence.observe(1, 1)
    assert sequence.acceptances(sequence.source.acceptances(1))[0] > 0.45
