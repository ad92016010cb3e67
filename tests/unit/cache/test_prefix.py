from __future__ import annotations

import pytest

from hf_accel.cache.pool import BlockPool, PrefixIndex


def index_of(token_ids: list[int], *, block_size: int = 4) -> tuple[PrefixIndex, list[int]]:
    pool = BlockPool(16, block_size=block_size)
    index = PrefixIndex(pool)
    blocks = [pool.allocate() for _ in range(-(-len(token_ids) // block_size))]
    index.insert(token_ids, blocks)
    return index, blocks


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
    index, blocks = index_of(list(range(10)))
    assert index.match(query) == blocks[:num_found]
    assert (index.lookups, index.hits) == (len(query) // 4, num_found)


def test_known_content_keeps_its_first_block() -> None:
    index, blocks = index_of([1, 2, 3, 4])
    other = index.pool.allocate()
    index.insert([1, 2, 3, 4], [other])
    assert index.match([1, 2, 3, 4]) == blocks and other not in index


def test_insert_continues_a_known_chain() -> None:
    index, blocks = index_of(list(range(8)))
    more = [*blocks, index.pool.allocate()]
    index.insert(list(range(12)), more)
    assert index.match(list(range(12))) == more


def test_forgetting_a_block_ends_the_chain_there() -> None:
    index, blocks = index_of(list(range(12)))
    index.remove(blocks[1])
    assert index.match(list(range(12))) == blocks[:1] and len(index) == 2


def test_ids_that_share_digits_do_not_share_blocks() -> None:
    index, _ = index_of([1, 12, 3, 4])
    assert index.match([11, 2, 3, 4]) == []
    assert index.match([1, 12, 3, 2**32 + 4]) == []
