from __future__ import annotations

import pytest

from hf_accel.cache.pool import BlockPool, PrefixIndex
from hf_accel.errors import OutOfBlocksError


def test_a_block_comes_back_when_its_last_reference_goes() -> None:
    pool = BlockPool(2, block_size=4)
    block = pool.allocate()
    pool.retain(block)
    pool.release(block)
    assert (pool.num_used, pool.num_free, pool.reference_count(block)) == (1, 1, 1)
    pool.release(block)
    assert (pool.num_used, pool.num_free, pool.reference_count(block)) == (0, 2, 0)


def test_a_fixed_pool_runs_out_with_the_way_out() -> None:
    pool = BlockPool(1, block_size=4)
    pool.allocate()
    with pytest.raises(OutOfBlocksError, match=r"all 1 blocks of 4 tokens are in use; raise CacheConfig\(max_tokens"):
        pool.allocate()


def test_a_growable_pool_doubles_and_keeps_its_blocks() -> None:
    pool = BlockPool(1, block_size=4, growable=True)
    blocks = [pool.allocate() for _ in range(5)]
    assert sorted(blocks) == [0, 1, 2, 3, 4] and pool.num_blocks == 8


def test_double_release_and_retaining_a_blank_block_are_errors() -> None:
    pool = BlockPool(2, block_size=4)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(ValueError, match=f"block {block} is not in use; it was released twice"):
        pool.release(block)
    with pytest.raises(ValueError, match=f"block {block} is blank"):
        pool.retain(block)


def test_cached_blocks_are_evicted_after_blank_ones_least_recently_used_first() -> None:
    pool = BlockPool(4, block_size=1)
    index = PrefixIndex(pool)
    first, second = pool.allocate(), pool.allocate()
    index.insert([b"1"], [first])
    index.insert([b"2"], [second])
    pool.release(second)
    pool.release(first)
    assert pool.num_free == 4
    assert {pool.allocate(), pool.allocate()}.isdisjoint({first, second})
    assert pool.allocate() == second and index.find(b"2") is None
    assert index.find(b"1") == first


def test_a_cached_block_is_revived_by_retain() -> None:
    pool = BlockPool(1, block_size=1)
    index = PrefixIndex(pool)
    block = pool.allocate()
    index.insert([b"7"], [block])
    pool.release(block)
    pool.retain(block)
    assert pool.reference_count(block) == 1
    with pytest.raises(OutOfBlocksError):
        pool.allocate()


def test_only_a_private_block_that_no_index_vouches_for_is_writable() -> None:
    pool = BlockPool(2, block_size=1)
    index = PrefixIndex(pool)
    block = pool.allocate()
    assert pool.is_writable(block)
    pool.retain(block)
    assert not pool.is_writable(block)
    pool.release(block)
    index.insert([b"1"], [block])
    assert not pool.is_writable(block)
    index.clear()
    assert pool.is_writable(block)


def test_clearing_the_index_blanks_cached_blocks() -> None:
    pool = BlockPool(1, block_size=1)
    index = PrefixIndex(pool)
    block = pool.allocate()
    index.insert([b"1"], [block])
    pool.release(block)
    index.clear()
    assert pool.num_free == 1 and pool.allocate() == block and len(index) == 0
