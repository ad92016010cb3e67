"""States that wait to be read: those of rejected tokens go, and too many are dropped."""

from __future__ import annotations

import random

import pytest
import torch

from hf_accel.fused.state_rows import StateRows, end_to_end
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.drafters.unread_states import StatesBook, UnreadStates


def states(start: int, count: int, more: int = 0) -> StateRows:
    """States that name their token, in the middle of a pass, of two layers."""
    numbers = more + torch.arange(start - 2, start + count + 3, dtype=torch.float32)
    return StateRows((numbers[None, :, None], -numbers[None, :, None]), 2, count)


def tokens(parts: list[StateRows]) -> list[int]:
    found = end_to_end(parts)
    assert torch.equal(found[:, 0], -found[:, 1])
    return [int(number) for number in found[:, 0]]


def sequence(num_tokens: int) -> Sequence:
    made = Sequence([1] * num_tokens, RequestSettings(8, None))  # type: ignore[arg-type]
    made.num_computed = num_tokens - 1
    return made


def test_what_is_read_is_what_came_last() -> None:
    """Passes write states behind what is final, and begin again where tokens were rejected."""
    draw = random.Random(0)
    unread, final, read = UnreadStates(None, 0, 0, []), 0, []
    for number in range(200):
        count = draw.randint(1, 5)
        assert unread.add(final, states(final, count, 1000 * number))
        final = draw.randint(max(final, unread.start), final + count)
        unread.cut(final)
        assert unread.end == final == unread.start + unread.count
        assert unread.count == sum(map(len, unread.parts))
        if draw.random() < 0.5 and unread.count:
            read += tokens(unread.take(draw.randint(1, unread.count)))
    assert [value % 1000 for value in read] == [place % 1000 for place in range(len(read))]
    assert unread.num_read == len(read) > 100


def test_states_that_are_missing_begin_a_new_reader() -> None:
    ended: list[int] = []
    readers = iter(range(9))
    book = StatesBook(lambda: next(readers), ended.append)
    each = sequence(7)
    book.watch(each, 0, states(0, 3))
    assert book.ready(each) is None  # those of 3 to 5 are to come
    book.watch(each, 4, states(4, 2))
    found = book.ready(each)
    assert found is not None and (found.reader, found.first, found.end) == (1, 4, 6) and ended == [0]
    book.forget(each)
    assert ended == [0, 1] and book.ready(each) is None


def test_followers_get_the_states_of_the_prompt() -> None:
    book = StatesBook(object)
    first, other = sequence(4), sequence(4)
    first.followers.append(other)
    book.watch(first, 0, states(0, 3))
    found = book.ready(other)
    assert found is not None and tokens(found.parts) == [0, 1, 2]


def test_the_oldest_of_too_many_states_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_accel.generation.speculation.drafters.unread_states.MOST_WAITING", 6)
    book, each = StatesBook(object), sequence(9)
    for start in range(0, 8, 2):
        book.watch(each, start, states(start, 2))
    found = book.ready(each)
    assert found is not None and found.first == found.start == 5
    assert tokens(found.parts) == [5, 6, 7]
