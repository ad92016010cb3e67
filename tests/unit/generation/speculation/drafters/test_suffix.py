from __future__ import annotations

import random

import pytest

from hf_accel.errors import UnsupportedError
from hf_accel.generation.speculation.drafters.suffix import WALK, SuffixAutomaton, SuffixDrafter

from .texts import continued, latest_repeat, longest_repeat, sequence, texts

TEXTS = texts(200)


@pytest.mark.parametrize("name", TEXTS)
def test_the_longest_repeated_ending_is_what_brute_force_finds(name: str) -> None:
    automaton, tokens = SuffixAutomaton(), TEXTS[name]
    for count in range(1, len(tokens) + 1):
        automaton.extend(tokens[count - 1 : count])
        matched, end = automaton.longest_repeated()
        expected = longest_repeat(tokens[:count], count)
        assert matched == expected[0]
        if number_of_repeats(automaton) <= WALK:
            assert end == expected[1]
        elif matched:  # older perhaps, but it is one
            assert tokens[end - matched : end] == tokens[count - matched : count] and end < count


def number_of_repeats(automaton: SuffixAutomaton) -> int:
    """Endings of the text that end at different places: how far one would have to walk to age them all."""
    count, state = 0, automaton._link[automaton._whole]
    while state > 0:
        count, state = count + 1, automaton._link[state]
    return count


def test_the_latest_occurrence_is_exact_in_random_texts() -> None:
    dice = random.Random(1)
    for _ in range(60):
        tokens = [dice.randrange(dice.randrange(2, 5)) for _ in range(60)]
        automaton = SuffixAutomaton()
        automaton.extend(tokens)
        matched, end = automaton.longest_repeated()
        assert (latest_repeat(tokens, matched), latest_repeat(tokens, matched + 1)) == (end, None)


@pytest.mark.parametrize("name", TEXTS)
def test_states_are_linear_in_the_text(name: str) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(TEXTS[name])
    assert automaton.num_states <= 2 * len(TEXTS[name])
    assert sum(map(len, automaton._next)) <= 3 * len(TEXTS[name])


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_longer_matches_get_longer_drafts(factor: float) -> None:
    copied = list(range(100, 140))
    drafter = SuffixDrafter(fewest=2, factor=factor)
    text = sequence([*copied, 7])
    for matched in range(1, 20):
        text.tokens.append(copied[matched - 1])
        (draft,) = drafter.propose([text], [8])
        count = 0 if matched < 2 else min(8, int(factor * matched))
        assert draft.tokens == continued(text.tokens, matched, count)
        assert draft.probabilities is None


def test_a_period_is_continued_beyond_the_text() -> None:
    text = sequence([1, 2, 3] * 4)
    assert SuffixDrafter().propose([text], [7])[0].tokens == [1, 2, 3, 1, 2, 3, 1]


def test_no_draft_is_longer_than_allowed() -> None:
    text = sequence([1] * 50)
    drafts = SuffixDrafter().propose([text, text, sequence([])], [3, 0, 3])
    assert [len(draft) for draft in drafts] == [3, 0, 0]


def test_sequences_are_told_apart_and_let_go() -> None:
    drafter = SuffixDrafter(fewest=1)
    first, second = sequence([1, 2, 1]), sequence([1, 3, 1])
    assert [draft.tokens for draft in drafter.propose([first, second], [1, 1])] == [[2], [3]]
    drafter.forget(first)
    assert len(drafter._automata) == 1
    del second
    assert len(drafter._automata) == 0


@pytest.mark.parametrize("keywords", [{"fewest": 0}, {"factor": 0}, {"factor": float("nan")}])
def test_what_makes_no_sense_is_refused(keywords: dict[str, float]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(keywords))):
        SuffixDrafter(**keywords)
