"""The tables of states: which tokens have one, and to where a sequence can go back."""

from __future__ import annotations

import random

import pytest

from hf_accel.cache.kinds.states import MOST_STATES, StateGroup, StateTable
from hf_accel.cache.pages import Pages
from hf_accel.errors import OutOfBlocksError


def table(num_blocks: int = 40) -> StateTable:
    return StateGroup(num_blocks=num_blocks, growable=False).table()


def test_many_tokens_have_one_state_and_few_have_each() -> None:
    one = table()
    one.append(100)
    one.append(3, each=True)
    assert one.tokens == [99, 100, 101, 102] and one.num_tokens == 103
    one.append(MOST_STATES + 1, each=True)
    assert one.tokens == [99, 100, 101, 102, 135]


def test_going_back_needs_the_state_before_the_next_token() -> None:
    one = table()
    one.append(10)
    one.append(3, each=True)
    with pytest.raises(ValueError, match="cannot go back to 9 tokens: the recurrent state after them was not kept"):
        one.truncate(9)
    one.truncate(11)
    assert (one.tokens, one.num_tokens, one.pool.num_used) == ([9, 10], 11, 2)
    one.drop_before(10)
    assert (one.tokens, one.slot_before(11)) == ([10], one.blocks[0])
    with pytest.raises(ValueError, match="the state before token 10 is not held"):
        one.slot_before(10)
    one.truncate(11)
    one.release()
    assert (one.tokens, one.num_tokens, one.pool.num_used, one.slot_before(0)) == ([], 0, 0, -1)


def test_a_pool_that_is_full() -> None:
    one = table(2)
    one.append(50)
    one.append(1)
    with pytest.raises(OutOfBlocksError):
        one.append(1)
    assert (one.tokens, one.num_tokens) == ([49, 50], 51)


def test_random_programmes_of_forks() -> None:
    """Blocks are counted as by a dictionary of what each table holds."""
    numbers = random.Random(0)
    pages = Pages([StateGroup(num_blocks=2, growable=True)])
    sequences = [pages.begin()]
    for _ in range(600):
        sequence = numbers.choice(sequences)
        one = sequence.tables[0]
        assert isinstance(one, StateTable)
        match numbers.randrange(5):
            case 0:
                pages.append(sequence, numbers.randint(1, 50))
            case 1:
                pages.append(sequence, numbers.randint(1, 4), start=one.num_tokens)
            case 2 if one.tokens:
                sequence.truncate(numbers.choice(one.tokens) + 1)
            case 3 if len(sequences) < 6:
                sequences.append(sequence.fork())
            case 4 if len(sequences) > 1:
                sequence.release()
                sequences.remove(sequence)
        held = {block for each in sequences for block in each.tables[0].blocks}
        assert len(held) == pages.groups[0].pool.num_used
        assert all(not t.num_tokens or t.tokens[-1] == t.num_tokens - 1 for each in sequences for t in each.tables)
        # One state before the pass that comes next is held by all, so that it can start.
        assert all(t.slot_before(t.num_tokens) >= (0 if t.num_tokens else -1) for s in sequences for t in s.tables)
