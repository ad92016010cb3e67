"""Blocks that must survive a failure, pages that must survive a mode, and a crop that must be refused."""

from __future__ import annotations

import pytest
import torch
from transformers import MistralConfig

from hf_accel.cache import BlockPool, BlockTable, KVStorage, PrefixIndex
from hf_accel.cache.hf import PagedCache
from hf_accel.errors import OutOfBlocksError, UnsupportedError


def test_failed_append_evicts_nothing() -> None:
    """A prompt that does not fit must not cost what is cached of other prompts."""
    pool = BlockPool(8, block_size=4)
    index = PrefixIndex(pool)
    table = BlockTable(pool)
    table.append(12)
    blocks, tokens = list(table.blocks), list(range(12))
    index.insert(tokens, blocks)
    table.release()
    with pytest.raises(OutOfBlocksError, match="8 of 8 blocks of 4 tokens are free, 9 are needed"):
        BlockTable(pool).append(33)
    assert index.match(tokens) == blocks


def test_freed_block_is_used_again_before_an_untouched_one() -> None:
    """Pages that no token was ever written to take no memory."""
    pool = BlockPool(1000, block_size=16)
    taken = set()
    for _ in range(50):
        taken.add(block := pool.allocate())
        pool.release(block)
    assert len(taken) == 1


@pytest.mark.parametrize("num_blocks, block_size", [(0, 16), (-1, 16), (4, 0), (4, True)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(UnsupportedError, match="at least 1"):
        BlockPool(num_blocks, block_size=block_size)


def test_partly_filled_last_block_is_never_dropped() -> None:
    table = BlockTable(BlockPool(8, block_size=4))
    table.append(10)
    table.drop_before(100)
    table.append(3)
    assert (table.num_dropped_blocks, len(table.slots(8, 13))) == (2, 5)


@pytest.mark.parametrize("quantized", [None, torch.int8])
@pytest.mark.parametrize("grown", [False, True])
def test_pages_made_in_inference_mode_can_be_written_outside_it(quantized: torch.dtype | None, grown: bool) -> None:
    with torch.inference_mode():
        storage = KVStorage(
            2, num_kv_heads=1, block_size=4, key_dim=8, value_dim=8, dtype=torch.float32, device="cpu",
            quantized=quantized,
        )  # fmt: skip
        if grown:
            storage.grow(4)
    states = torch.ones(1, 1, 8)
    storage.write(states, states, torch.tensor([5]))
    assert storage.read(torch.tensor([5]))[0].eq(1).all()


@pytest.mark.parametrize("num_removed, refused", [(0, False), (1, False), (2, True), (9, True), (40, False)])
def test_crop_that_needs_tokens_behind_the_window_is_refused(num_removed: int, refused: bool) -> None:
    """40 tokens, window 8, blocks of 4: the last pass released tokens up to 31 (39 - 8 + 1 = 32)."""
    config = MistralConfig(num_hidden_layers=1, sliding_window=8)
    cache = PagedCache(config, block_size=4)
    for _ in range(40):
        cache.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)
    if refused:
        with pytest.raises(UnsupportedError, match="a sliding window of 8 needs those from"):
            cache.crop(-num_removed)
        assert cache.get_seq_length() == 40
    else:
        cache.crop(-num_removed)
        assert cache.get_seq_length() == 40 - num_removed
