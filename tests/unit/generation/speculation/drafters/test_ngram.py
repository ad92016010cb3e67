from __future__ import annotations

import gc
import weakref

import pytest

from hf_accel.errors import UnsupportedError
from hf_accel.generation.speculation.drafters.drafter import copy_from
from hf_accel.generation.speculation.drafters.ngram import NgramDrafter

from .texts import continued, longest_repeat, sequence, texts

TEXTS = texts(300)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(("fewest", "most"), [(1, 1), (2, 5), (3, 3)])
def test_drafts_are_what_brute_force_finds(name: str, fewest: int, most: int) -> None:
    drafter = NgramDrafter(fewest, most)
    text = sequence([])
    for step, token in enumerate(TEXTS[name]):
        text.tokens.append(token)
        if step % 3 == 1:  # it catches up with several tokens at once
            continue
        matched, end = longest_repeat(text.tokens, most)
        (draft,) = drafter.propose([text], [6])
        assert draft.tokens == (continued(text.tokens, end, 6) if matched >= fewest else [])
        assert draft.probabilities is None


def test_the_latest_occurrence_is_followed_not_the_first() -> None:
    text = sequence([1, 2, 3, 9, 1, 2, 4, 9, 1, 2])
    assert NgramDrafter(2, 3).propose([text], [2])[0].tokens == [4, 9]


def test_a_longer_match_goes_before_a_later_one() -> None:
    text = sequence([5, 1, 2, 3, 7, 1, 2, 4, 5, 1, 2])
    assert NgramDrafter(1, 3).propose([text], [1])[0].tokens == [3]
    assert NgramDrafter(1, 2).propose([text], [1])[0].tokens == [4]


def test_the_beginning_of_the_text_matches_nothing_before_it() -> None:
    assert NgramDrafter(2, 3).propose([sequence([0]), sequence([0, 0]), sequence([])], [4, 4, 4]) == [
        *NgramDrafter(2, 3).propose([sequence([1])] * 3, [0, 0, 0])
    ]
    assert NgramDrafter(2, 3).propose([sequence([0, 0, 0])], [3])[0].tokens == [0, 0, 0]


def test_large_token_ids_do_not_run_into_each_other() -> None:
    top = (1 << 32) - 2
    text = sequence([top, top, 7, 0, 5, top, top])
    assert NgramDrafter(2, 2).propose([text], [3])[0].tokens == [7, 0, 5]


def test_sequences_do_not_learn_from_each_other() -> None:
    first, second = sequence([1, 2, 3, 1, 2]), sequence([1, 2])
    drafts = NgramDrafter(2, 5).propose([first, second], [2, 2])
    assert [draft.tokens for draft in drafts] == [[3, 1], []]


def test_an_ended_sequence_is_let_go() -> None:
    drafter = NgramDrafter()
    kept, dropped = sequence([1, 2, 1, 2]), sequence([1, 2, 1, 2])
    drafter.propose([kept, dropped], [1, 1])
    reference = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert reference() is None and len(drafter._indices) == 1
    drafter.forget(kept)
    drafter.forget(kept)
    assert len(drafter._indices) == 0
    assert drafter.propose([kept], [1])[0].tokens == [1]


@pytest.mark.parametrize(("fewest", "most"), [(0, 2), (3, 2)])
def test_impossible_matches_are_refused(fewest: int, most: int) -> None:
    with pytest.raises(UnsupportedError, match="fewest"):
        NgramDrafter(fewest, most)


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("start", range(4))
def test_a_copy_goes_on_with_itself(start: int, count: int) -> None:
    assert copy_from([1, 2, 3, 4], start, count) == continued([1, 2, 3, 4], start, count)
