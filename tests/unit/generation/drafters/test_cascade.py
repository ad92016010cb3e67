from __future__ import annotations

from collections.abc import Sequence as Many

import pytest

from hf_accel.errors import UnsupportedError
from hf_accel.generation.drafters.base import Draft, Drafter
from hf_accel.generation.drafters.cascade import Cascade
from hf_accel.generation.sequence import Sequence

from .texts import sequence


class Says(Drafter):
    """Proposes one token over and over, for sequences that end with one of `after`."""

    def __init__(self, name: str, after: set[int], token: int, is_free: bool) -> None:
        self.name, self.after, self.token, self.is_free = name, after, token, is_free
        self.asked: list[list[int]] = []
        self.forgot = 0

    def propose(self, sequences: Many[Sequence], lengths: Many[int]) -> list[Draft]:
        self.asked.append([s.tokens[-1] for s in sequences])
        return [
            Draft([self.token] * length if s.tokens[-1] in self.after else [])
            for s, length in zip(sequences, lengths, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        self.forgot += 1


def test_each_sequence_takes_the_first_proposal_and_free_ones_go_first() -> None:
    model = Says("model", {1, 2, 3, 4}, 70, is_free=False)
    lookup = Says("lookup", {2}, 80, is_free=True)
    other = Says("other", {2, 3}, 90, is_free=True)
    sequences = [sequence([token]) for token in (1, 2, 3, 4)]
    drafts = Cascade([model, lookup, other]).propose(sequences, [2, 1, 3, 0])
    assert [draft.tokens for draft in drafts] == [[70, 70], [80], [90] * 3, []]
    assert [draft.source for draft in drafts] == ["model", "lookup", "other", ""]
    assert (lookup.asked, other.asked, model.asked) == ([[1, 2, 3]], [[1, 3]], [[1]])


def test_later_drafters_rest_when_nobody_needs_them() -> None:
    lookup = Says("lookup", {1}, 80, is_free=True)
    model = Says("model", {1}, 70, is_free=False)
    Cascade([lookup, model]).propose([sequence([1])], [2])
    Cascade([lookup, model]).propose([sequence([2])], [0])
    assert model.asked == [] and lookup.asked == [[1]]


def test_all_are_told_to_forget() -> None:
    drafters = [Says("a", set(), 0, True), Says("b", set(), 0, False)]
    cascade = Cascade(drafters)
    cascade.forget(sequence([1]))
    assert [drafter.forgot for drafter in drafters] == [1, 1]
    assert not cascade.is_free and Cascade(drafters[:1]).is_free


def test_none_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="at least one"):
        Cascade([])
