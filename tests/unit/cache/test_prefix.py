"""Prefixes over groups of several kinds, beside what each group holds by the definition."""

from __future__ import annotations

import random

import pytest

from hf_accel.cache.cached_sequence import CachedSequence
from hf_accel.cache.group import PageGroup
from hf_accel.cache.kinds.states import MOST_SNAPSHOTS, StateGroup
from hf_accel.cache.pages import Pages
from hf_accel.errors import OutOfBlocksError

SIZE = 4


def pages_of(*windows: int | None, states: bool = False, num_blocks: int = 64) -> Pages:
    groups: list[PageGroup] = [
        PageGroup(
            window=window, num_blocks=num_blocks, block_size=SIZE, growable=False, prefix_sharing=True, quantized=None
        )
        for window in windows
    ]
    if states:
        groups.append(StateGroup(num_blocks=num_blocks, growable=False, prefix_sharing=True))
    return Pages(groups)


def computed(pages: Pages, token_ids: list[int], *, chunk: int | None = None) -> CachedSequence:
    """Return a sequence of which all tokens were computed, in chunks of so many, and published."""
    sequence = pages.begin_with_prefix(token_ids)
    while sequence.num_tokens < len(token_ids):
        start = sequence.num_tokens
        pages.append(sequence, min(chunk or len(token_ids), len(token_ids) - start))
        pages.publish(sequence, token_ids[: sequence.num_tokens])
        pages.publish_states(sequence, sequence.num_tokens)
    return sequence


@pytest.mark.parametrize(
    ("query", "num_found"),
    [
        (list(range(10)), 2),  # the partly filled block is not known
        (list(range(8)), 2),
        (list(range(7)), 1),
        (list(range(3)), 0),
        ([0, 1, 2, 3, 9, 9, 9, 9], 1),
        ([9, 1, 2, 3, 4, 5, 6, 7], 0),
        ([4, 5, 6, 7], 0),  # the same tokens, another history
        ([], 0),
    ],
)
def test_match_finds_the_longest_known_beginning(query: list[int], num_found: int) -> None:
    pages = pages_of(None)
    blocks = computed(pages, list(range(10))).tables[0].blocks
    found = pages.begin(pages.match_prefix(query))
    assert found.tables[0].blocks == blocks[:num_found]
    counts = pages.statistics()
    assert (counts["prefix_lookups"], counts["prefix_hits"]) == (10 // SIZE + len(query) // SIZE, num_found)


def test_known_content_keeps_its_first_block() -> None:
    pages = pages_of(None)
    index = pages.groups[0].index
    other = pages.begin()  # it knows nothing of the first, as if both had come in one pass
    first = computed(pages, [1, 2, 3, 4])
    pages.append(other, 4)
    assert pages.publish(other, [1, 2, 3, 4]) == []
    assert pages.begin(pages.match_prefix([1, 2, 3, 4])).tables[0].blocks == first.tables[0].blocks
    assert index is not None and other.tables[0].blocks[0] not in index


def test_a_removed_block_ends_the_prefix_there() -> None:
    pages = pages_of(None)
    blocks = computed(pages, list(range(12))).tables[0].blocks
    pages.withdraw([(0, blocks[1])])
    assert pages.begin(pages.match_prefix(list(range(12)))).tables[0].blocks == blocks[:1]


def test_ids_that_share_digits_do_not_share_blocks() -> None:
    pages = pages_of(None)
    computed(pages, [1, 12, 3, 4])
    assert pages.match_prefix([11, 2, 3, 4]).digests == []
    assert pages.match_prefix([1, 12, 3, 2**32 + 4]).digests == []


def test_tokens_that_took_the_place_of_others_have_digests_of_their_own() -> None:
    pages = pages_of(None)
    sequence = computed(pages, list(range(8)))
    sequence.truncate(5)
    pages.append(sequence, 3)
    pages.publish(sequence, [0, 1, 2, 3, 4, 9, 9, 9])
    assert len(pages.match_prefix([0, 1, 2, 3, 4, 9, 9, 9]).digests) == 2
    assert len(pages.match_prefix(list(range(8))).digests) == 2
    assert len(pages.match_prefix([0, 1, 2, 3, 4, 5, 9, 9]).digests) == 1


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9, 100])
def test_a_window_needs_the_last_blocks_alone(window: int) -> None:
    """Token 12 sees the `window - 1` tokens before it, so the blocks before these may be gone."""
    pages = pages_of(None, window)
    tokens = list(range(13))
    sequence = computed(pages, tokens)
    first = max(0, 12 - window + 1) // SIZE
    assert pages.groups[1].index is not None
    for block in sequence.tables[1].blocks[:first]:
        pages.withdraw([(1, block)])
    found = pages.begin_with_prefix(tokens)
    assert found.num_tokens == 12 and found.tables[1].num_dropped_blocks == first
    assert found.tables[1].blocks == sequence.tables[1].blocks[first:3]
    assert pages.missing(found, 12) is None
    if first < 3:
        pages.withdraw([(1, sequence.tables[1].blocks[first])])
        assert pages.begin_with_prefix(tokens).num_tokens == 0


def test_states_are_kept_where_prompts_part() -> None:
    """The third prompt with one beginning goes on behind it, since the second has shown that it is shared."""
    pages = pages_of(None, states=True)
    shared = list(range(20))
    first = [*shared, *range(100, 117)]
    computed(pages, first).release()
    again = pages.begin_with_prefix(first)
    assert again.num_tokens == 36  # the last boundary before its last token
    assert pages.begin_with_prefix([*first[:36], 7, 7, 7, 7, 7]).num_tokens == 36  # the next turn of a chat
    second = computed(pages, [*shared, *range(200, 217)])
    assert second.tables[1].num_tokens == 37
    assert pages.begin_with_prefix([*shared, 1, 2, 3]).num_tokens == 20


def test_a_state_is_found_only_once_its_pass_is_done() -> None:
    pages = pages_of(None, states=True)
    tokens = list(range(9))
    sequence = pages.begin_with_prefix(tokens)
    pages.append(sequence, 9)
    pages.publish(sequence, tokens)
    assert pages.begin_with_prefix(tokens).num_tokens == 0
    pages.publish_states(sequence, 9)
    assert pages.begin_with_prefix(tokens).num_tokens == 8


def test_a_state_is_published_after_its_own_pass_alone() -> None:
    """A chunk is published ahead of its pass, and with it the states of chunks before."""
    pages = pages_of(None, states=True)
    tokens = list(range(9))
    sequence = pages.begin_with_prefix(tokens)
    pages.append(sequence, 4)
    pages.append(sequence, 4)
    pages.publish(sequence, tokens[:8])
    pages.publish_states(sequence, 4)
    assert pages.begin_with_prefix(tokens).num_tokens == 4


def test_a_long_answer_keeps_one_state() -> None:
    """The next turn goes on behind it, and states of other prompts stay."""
    pages = pages_of(None, states=True, num_blocks=512)
    other, prompt, answer = [7] * 9, list(range(9)), list(range(100, 150))
    computed(pages, other).release()
    sequence, tokens = computed(pages, prompt), list(prompt)
    for token in answer:
        tokens.append(token)
        pages.append(sequence, 1)
        pages.publish(sequence, tokens)
        pages.publish_states(sequence, len(tokens))
    sequence.release()
    assert pages.groups[1].pool.num_cached == 3  # of the other prompt, of this one, and behind its answer
    assert pages.begin_with_prefix([*tokens, 1, 2]).num_tokens == 56
    assert pages.begin_with_prefix([*prompt, 1, 2]).num_tokens == 8
    assert pages.begin_with_prefix(other).num_tokens == 8


def test_kept_states_are_few() -> None:
    pages = pages_of(None, states=True, num_blocks=512)
    for number in range(3 * MOST_SNAPSHOTS):
        computed(pages, [number] * 9).release()
    pool = pages.groups[1].pool
    assert (pool.num_used, pool.num_cached) == (0, MOST_SNAPSHOTS)
    assert pages.begin_with_prefix([3 * MOST_SNAPSHOTS - 1] * 9).num_tokens == 8
    assert pages.begin_with_prefix([0] * 9).num_tokens == 0


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("windows", [(None,), (5,), (None, 3), (9, 2), (None, 1, 6)])
def test_random_sequences_go_on_only_behind_what_was_kept(windows: tuple[int | None, ...], states: bool) -> None:
    """A found sequence holds blocks of the very tokens that it has, in each group and as far as it needs them."""
    numbers = random.Random(len(windows) + 10 * states)
    pages = pages_of(*windows, states=states, num_blocks=24)
    held: dict[tuple[int, int], tuple[int, ...]] = {}  # (group, block) -> all tokens up to its end
    alive: list[tuple[CachedSequence, list[int]]] = []
    num_found = 0
    for _ in range(400):
        if len(alive) > 3 or (alive and numbers.random() < 0.2):
            alive.pop(numbers.randrange(len(alive)))[0].release()
            continue
        source = numbers.choice([tokens for _, tokens in alive] or [[]])
        beginning = source[: numbers.randrange(40)]
        tokens = beginning + [numbers.randrange(3) for _ in range(numbers.randrange(1, 12))]
        sequence = pages.begin_with_prefix(tokens)
        check(pages, sequence, tokens, held)
        num_found += sequence.num_tokens > 0
        try:
            while sequence.num_tokens < len(tokens):
                pages.append(sequence, min(numbers.choice([1, 3, 20]), len(tokens) - sequence.num_tokens))
                note(sequence, tokens, held)
                pages.publish(sequence, tokens[: sequence.num_tokens])
                pages.publish_states(sequence, sequence.num_tokens)
        except OutOfBlocksError:
            sequence.release()
            continue
        alive.append((sequence, tokens))
    assert num_found > 20


def note(sequence: CachedSequence, tokens: list[int], held: dict[tuple[int, int], tuple[int, ...]]) -> None:
    """Write down what the last pass has written into blocks."""
    for group, table in enumerate(sequence.tables):
        ends = getattr(table, "tokens", None)
        for number, block in enumerate(table.blocks):
            end = (table.num_dropped_blocks + number + 1) * SIZE if ends is None else ends[number] + 1
            held[group, block] = tuple(tokens[: min(end, sequence.num_tokens)])


def check(
    pages: Pages, sequence: CachedSequence, tokens: list[int], held: dict[tuple[int, int], tuple[int, ...]]
) -> None:
    count = sequence.num_tokens
    assert count < len(tokens) and pages.missing(sequence, count) is None
    for number, (group, table) in enumerate(zip(pages.groups, sequence.tables, strict=True)):
        assert table.num_tokens == count
        if isinstance(group, StateGroup):
            assert [held[number, block] for block in table.blocks] == ([tuple(tokens[:count])] if count else [])
            continue
        first = 0 if group.window is None else max(0, count - group.window + 1)
        assert count == 0 or table.num_dropped_blocks * SIZE <= first
        for place, block in enumerate(table.blocks, table.num_dropped_blocks + 1):
            assert held[number, block] == tuple(tokens[: place * SIZE])
