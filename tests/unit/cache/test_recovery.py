"""Blocks that must survive a failure, pages that must survive a mode, and a crop that must be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MistralConfig

from hf_accel.cache import storage as storage_module
from hf_accel.cache.group import PageGroup
from hf_accel.cache.hf import PagedCache
from hf_accel.cache.pool import BlockPool, BlockTable, PrefixIndex
from hf_accel.cache.quantized import QUANTIZED, PageDtypes
from hf_accel.cache.storage import KVStorage
from hf_accel.errors import OutOfBlocksError, UnsupportedError


def test_failed_append_evicts_nothing() -> None:
    """A prompt that does not fit must not cost what is cached of other prompts."""
    pool = BlockPool(8, block_size=4)
    index = PrefixIndex(pool)
    table = BlockTable(pool)
    table.append(12)
    blocks, digests = list(table.blocks), [b"first", b"second", b"third"]
    index.insert(digests, blocks)
    table.release()
    with pytest.raises(OutOfBlocksError, match="8 of 8 blocks of 4 tokens are free, 9 are needed"):
        BlockTable(pool).append(33)
    assert [index.find(digest) for digest in digests] == blocks


def test_freed_block_is_used_again_before_an_untouched_one() -> None:
    """Pages that no token was ever written to take no memory."""
    pool = BlockPool(1000, block_size=16)
    taken = set()
    for _ in range(50):
        taken.add(block := pool.allocate())
        pool.release(block)
    assert len(taken) == 1


def test_partly_filled_last_block_is_never_dropped() -> None:
    table = BlockTable(BlockPool(8, block_size=4))
    table.append(10)
    table.drop_before(100)
    table.append(3)
    assert (table.num_dropped_blocks, len(table.slots(8, 13))) == (2, 5)


@pytest.mark.parametrize("quantized", [None, QUANTIZED["int8"], QUANTIZED["int8-int4"]])
@pytest.mark.parametrize("grown", [False, True])
def test_pages_made_in_inference_mode_can_be_written_outside_it(quantized: PageDtypes | None, grown: bool) -> None:
    with torch.inference_mode():
        storage = KVStorage(2, 4, torch.empty(0, 1, 8), torch.empty(0, 1, 8), quantized=quantized)
        if grown:
            storage.grow(4)
    states = torch.ones(1, 1, 8)
    storage.write(states, states, torch.tensor([5]))
    torch.testing.assert_close(storage.read(torch.tensor([5]))[0], states)


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


# -- an error in the middle -----------------------------------------------------------------------------------

POINTS = [(BlockPool, "allocate"), (BlockPool, "retain"), (PrefixIndex, "insert"), (PageGroup, "copy"),
          (PageGroup, "table_tensor"), (KVStorage, "grow")]  # fmt: skip


def failing_at(monkeypatch: pytest.MonkeyPatch, point: int) -> list[str]:
    """Raise at call number `point` of all POINTS; returns the list of those that were made."""
    made: list[str] = []

    def watched(owner: type, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **keywords: Any) -> Any:
            made.append(name)
            if len(made) == point:
                raise MemoryError("injected")
            return original(*args, **keywords)

        return staticmethod(call) if isinstance(vars(owner)[name], staticmethod) else call

    for owner, name in POINTS:
        monkeypatch.setattr(owner, name, watched(owner, name))
    return made


def states(ids: torch.Tensor) -> torch.Tensor:
    """K, which is also V, that tells each token from any other and from pages that were never written."""
    return (ids[:, None, :, None] + 100.0).expand(-1, 2, -1, 8).contiguous()


def turn(cache: PagedCache, ids: torch.Tensor) -> torch.Tensor:
    """One pass of a model of one layer; all that it would read, [B, T]."""
    cache.prepare(len(ids), ids.shape[1], device=ids.device, token_ids=ids, salt=b"weights")
    cache.update(states(ids), states(ids), 0)
    cache.unread = None  # as when attention has read it
    keys = cache.layers[0].keys
    assert keys is not None
    return keys[:, 0, :, 0] - 100


PROMPTS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]])


@pytest.mark.parametrize("max_tokens", [None, 48])
def test_an_error_while_a_pass_is_prepared_leaves_nothing_behind(max_tokens: int | None) -> None:
    """Nor blocks that others find by their tokens, though nothing was ever written to them."""
    point, done = 0, False
    while not done:
        point += 1
        cache = PagedCache(MistralConfig(num_hidden_layers=1, sliding_window=None), block_size=4, capacity=4,
                           max_tokens=max_tokens)  # fmt: skip
        turn(cache, torch.tensor([[7, 7, 7, 7, 7]]))  # there are pages, which have to grow
        cache.reset()
        with pytest.MonkeyPatch.context() as patch:
            made = failing_at(patch, point)
            try:
                turn(cache, PROMPTS)
                turn(cache, PROMPTS[:, -1:])
                done = len(made) < point
            except MemoryError:
                cache.reset()
        group = cache.pages.groups[0]
        assert done or group.pool.num_used == 0
        cache.reset()
        assert torch.equal(turn(cache, PROMPTS[1:]), PROMPTS[1:].float())
        assert group.pool.num_used == len({b for row in cache.padded.sequences for b in row.tables[0].blocks})
    assert point > 12


def test_prompts_that_did_not_fit_are_found_by_nobody() -> None:
    """The first of two was published before there was no room for the second; it was never computed."""
    cache = PagedCache(MistralConfig(num_hidden_layers=1, sliding_window=None), block_size=4, max_tokens=16)
    both = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3, 2, 1]])
    with pytest.raises(OutOfBlocksError):
        turn(cache, both)
    assert not cache.padded.sequences and not cache.has_prefixes
    cache.reset()
    assert torch.equal(turn(cache, both[:1]), both[:1].float())


def test_a_pass_that_stops_leaves_the_prefixes_of_others() -> None:
    """Nobody finds what it would have written, and everybody what was there before."""
    cache = PagedCache(MistralConfig(num_hidden_layers=2, sliding_window=None), block_size=4)
    ids = {"known": torch.arange(9)[None], "stopped": torch.cat([torch.arange(4), torch.arange(9)])[None]}
    for name, each in ids.items():
        cache.prepare(1, each.shape[1], device=each.device, token_ids=each, salt=b"weights")
        for layer in range(2 if name == "known" else 1):
            cache.update(states(each), states(each), layer)
            cache.unread = None
        assert len(cache.pages.match_prefix(each[0].tolist()).digests) == each.shape[1] // 4
        cache.reset()
    assert len(cache.pages.match_prefix(ids["known"][0].tolist()).digests) == 2
    assert len(cache.pages.match_prefix(ids["stopped"][0].tolist()).digests) == 1
    assert cache.pages.groups[0].pool.num_used == 0


def test_pages_that_cannot_grow_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """K without V would be taken for pages that have grown, and V written beyond its end."""
    storage = KVStorage(2, 4, torch.empty(0, 1, 8), torch.empty(0, 1, 8))
    made = []

    def no_memory(*args: Any, **keywords: Any) -> Any:
        made.append(args)
        if len(made) == 2:
            raise RuntimeError("can't allocate memory")
        return torch.empty(*args, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(storage_module, "_empty", no_memory)
        with pytest.raises(RuntimeError, match="can't allocate"):
            storage.grow(4)
    assert len(storage.pages.k) == len(storage.pages.v) == storage.num_blocks == 2
