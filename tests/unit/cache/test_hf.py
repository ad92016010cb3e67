from __future__ import annotations

import copy
import gc
import pickle
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)

import hf_accel
from hf_accel import CacheConfig, OutOfBlocksError, PagedCache, UnsupportedError
from hf_accel.cache.hf import PAGED_HANDLE, model_kinds

from ...parity.families import DECODER, build, prompts
from .programme import DIM, HEADS, LAYERS, Pair, check_blocks

BLOCK = 4
WINDOW = 8
SIZES: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": HEADS * DIM}
CONFIGS: dict[str, PreTrainedConfig] = {
    "full": LlamaConfig(**SIZES),
    "sliding": MistralConfig(**SIZES, sliding_window=WINDOW),
    "mixed": Gemma2Config(**SIZES, sliding_window=WINDOW),
}


def paged(kind: str = "full", **settings: Any) -> PagedCache:
    return PagedCache(CONFIGS[kind], **{"block_size": BLOCK} | settings)


def used(cache: PagedCache) -> int:
    return int(cache.statistics()["blocks_used"])


def fill(cache: PagedCache, batch: int, columns: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random columns into every layer; returns what the last layer's update did."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        keys, values = torch.randn(2, batch, HEADS, columns, DIM, generator=generator)
        out = cache.update(keys, values, layer)
    return out


def contents(cache: PagedCache) -> list[Tensor]:
    return [tensor.clone() for layer in cache.paged_layers for tensor in layer.columns()]


# -- as a DynamicCache ---------------------------------------------------------------------------------


def run_programme(kind: str, seed: int, operations: int, **settings: Any) -> None:
    generator = random.Random(seed)
    window = None if kind == "full" else WINDOW
    pairs = [Pair(paged(kind, capacity=BLOCK, **settings), DynamicCache(), window)]
    for _ in range(operations):
        pair = generator.choice(pairs)
        operation = generator.choices(
            ["append", "crop", "reorder", "repeat", "select", "reset", "fork", "drop"], [12, 4, 3, 2, 2, 1, 1, 1]
        )[0]
        if operation == "append" or not pair.columns:
            pair.append(generator)
        elif operation == "fork" and len(pairs) < 4:
            pairs.append(pair.fork())
        elif operation == "drop" and len(pairs) > 1:
            pairs.remove(pair)
            del pair
        elif operation == "reset":
            pair.reset()
        elif operation in ("crop", "reorder", "repeat", "select"):
            getattr(pair, operation)(generator)
        check_blocks(*(p.paged for p in pairs))
        for pair in pairs:
            if pair.columns:
                pair.compare_contents()
            assert pair.paged.get_seq_length() == pair.columns
            assert pair.paged.batch_size == (pair.batch or -1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("block_size", [1, BLOCK])
@pytest.mark.parametrize("kind", CONFIGS)
def test_random_programme_equals_dynamic_cache(kind: str, block_size: int) -> None:
    run_programme(kind, 0, 300, block_size=block_size)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("block_size", [1, 2, 3, BLOCK, 16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_long_random_programme_equals_dynamic_cache(kind: str, block_size: int, seed: int) -> None:
    run_programme(kind, seed, 1000, block_size=block_size)


def test_int8_keys_and_values_are_within_half_a_step() -> None:
    cache = paged(dtype="int8")
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(2, 2, HEADS, 11, DIM, generator=generator)
    for actual, expected in zip(cache.update(given[0], given[1], 0), given, strict=True):
        step = expected.abs().amax(-1, keepdim=True) / 127
        assert ((actual - expected).abs() <= step * 0.5001).all()


# -- padding, tokens and prefixes: as a patched model drives it ----------------------------------------


class Told:
    """A PagedCache that is told each pass's mask and token ids, and what each token's key then is.

    A key stands for its token, all tokens before it, and the salt, so that a block that is shared wrongly is seen.
    """

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.others: list[PagedCache] = []
        self.salt = b""
        self.ids: Tensor = torch.empty(0, 0, dtype=torch.int64)
        self.mask: Tensor = torch.empty(0, 0, dtype=torch.bool)

    def start(self, ids: Tensor, mask: Tensor, salt: bytes) -> None:
        self.cache.reset()
        self.salt = salt
        self.ids, self.mask = ids[:, :0], mask[:, :0]
        skipped = self.cache.adopt_prefix(ids, mask, salt)
        self.ids, self.mask = ids[:, :skipped], mask[:, :skipped]
        self.go_on(ids[:, skipped:], mask[:, skipped:], salt)

    def go_on(self, ids: Tensor, mask: Tensor, salt: bytes | None = None) -> None:
        fresh = not self.ids.shape[1]
        self.ids, self.mask = torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)
        self.cache.prepare(*ids.shape, device=ids.device, mask=self.mask, token_ids=ids, salt=salt if fresh else None)
        for layer in range(LAYERS):
            keys = self.keys(layer)[:, :, -ids.shape[1] :]
            returned, _ = self.cache.update(keys, -keys, layer)
            assert getattr(returned, PAGED_HANDLE).layer is self.cache.layers[layer]
            self.cache.unread = None  # as attention does when it reads the pages
        self.check()

    def keys(self, layer: int) -> Tensor:
        """[B, H, T, D], integers that float32 holds exactly; zero in the padding."""
        histories = []
        for ids, mask in zip(self.ids.tolist(), self.mask.tolist(), strict=True):  # in Python: a tensor takes longer
            running, row = sum(self.salt), []
            for token, real in zip(ids, mask, strict=True):
                running = (running * 31 + token + 1) % 10007 if real else running
                row.append(running + 20000 * layer + 1 if real else 0)
            histories.append(row)
        numbers = torch.tensor(histories, dtype=torch.float32)
        return numbers[:, None, :, None].expand(-1, HEADS, -1, DIM).contiguous()

    def check(self) -> None:
        for number, layer in enumerate(self.cache.paged_layers):
            expected = self.keys(number)
            seen = slice(max(0, expected.shape[2] - WINDOW) if layer.is_sliding else 0, None)
            keys, values = layer.columns()
            assert torch.equal(keys[:, :, seen], expected[:, :, seen])
            assert torch.equal(values[:, :, seen], -expected[:, :, seen])
        check_blocks(self.cache, *self.others)


def run_told(kind: str, seed: int, prompts: int, **settings: Any) -> Told:
    """Prompts over few token ids, so that prefixes repeat; each goes on for a while."""
    generator = torch.Generator().manual_seed(seed)
    choose = random.Random(seed)
    told = Told(paged(kind, **settings))
    known = torch.randint(0, 2, (4, 24), generator=generator)
    for _ in range(prompts):
        batch, length = choose.randint(1, 4), choose.randint(1, 20)
        ids = known[torch.randint(0, 4, (batch,), generator=generator), :length].clone()
        ids[:, -1] = torch.randint(0, 3, (batch,), generator=generator)
        pads = torch.randint(0, length, (batch, 1), generator=generator) * choose.randint(0, 1)
        columns = torch.arange(length)
        mask = columns >= pads if choose.random() < 0.6 else columns < length - pads
        if choose.random() < 0.5:  # equal tokens at unequal columns
            ids = torch.stack([row.roll(int(pad)) for row, pad in zip(ids, pads, strict=True)])
        told.start(ids, mask, salt=choose.choice([b"a", b"a", b"a", b"b"]))
        for _ in range(choose.randint(0, 10)):
            new = choose.randint(1, 3)
            more = torch.randint(0, 3, (len(told.ids), new), generator=generator)
            told.go_on(more, torch.ones(more.shape, dtype=torch.bool))
            if choose.random() < 0.3:
                beams = torch.randint(0, len(told.ids), (len(told.ids),), generator=generator)
                told.cache.reorder_cache(beams)
                told.ids, told.mask = told.ids[beams], told.mask[beams]
            if choose.random() < 0.3 and new > 1:
                told.cache.crop(-1)
                told.ids, told.mask = told.ids[:, :-1], told.mask[:, :-1]
    return told


def test_tokens_that_were_taken_back_are_no_prefix() -> None:
    told, salt = Told(paged()), b"a"

    def row(*ids: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)

    told.start(*row(5, 6, 7), salt)
    told.cache.crop(-1)
    told.ids, told.mask = told.ids[:, :-1], told.mask[:, :-1]
    told.go_on(*row(8, 9, 10))  # a block of 5, 6, 8, 9 is full now
    told.start(*row(5, 6, 7, 8, 1), salt)
    told.start(*row(5, 6, 8, 9, 1), salt)


@pytest.mark.parametrize("kind", CONFIGS)
def test_random_prompts(kind: str) -> None:
    told = run_told(kind, 0, 60, capacity=64)
    assert told.cache.statistics()["prefix_hits"] > 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_random_prompts_that_evict_each_other(kind: str) -> None:
    run_told(kind, 1, 60, max_tokens=4 * 56)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize("block_size", [1, 3, BLOCK])
@pytest.mark.parametrize("kind", CONFIGS)
def test_more_random_prompts(kind: str, block_size: int, seed: int) -> None:
    run_told(kind, seed, 100, block_size=block_size)


@pytest.mark.parametrize("lengths", [(13, 1, 8), (0, 5, 4), (12, 12, 12)])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_padding_takes_no_blocks(kind: str, side: str, lengths: tuple[int, ...]) -> None:
    cache = paged(kind, prefix_sharing=False)
    columns, tokens = torch.arange(13), torch.tensor(lengths)[:, None]
    mask = columns >= 13 - tokens if side == "left" else columns < tokens
    cache.prepare(3, 13, device=mask.device, mask=mask)
    groups = len(cache.pages.groups)
    assert used(cache) == groups * sum(-(-length // BLOCK) for length in lengths)


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("kind", ["sliding", "mixed"])
def test_sliding_layers_free_blocks_behind_the_window(kind: str, num_new: int) -> None:
    cache = paged(kind)
    sliding = next(i for i, g in enumerate(cache.pages.groups) if g.window is not None)
    fill(cache, 2, 30)
    for _ in range(200 // num_new):
        fill(cache, 2, num_new)
        # the window of the first new token, the new tokens, and up to a block less one on either side
        most = -(-(WINDOW - 1 + num_new + 2 * (BLOCK - 1)) // BLOCK)
        assert cache.pages.groups[sliding].pool.num_used <= 2 * most
    if kind == "mixed":
        full = cache.pages.groups[1 - sliding]
        assert full.pool.num_used == 2 * -(-cache.get_seq_length() // BLOCK)


@pytest.mark.parametrize("kind", CONFIGS)
def test_repeated_prompt_is_stored_once(kind: str) -> None:
    cache = paged(kind)
    fill(cache, 1, 7)
    groups = len(cache.pages.groups)
    assert used(cache) == groups * 2
    cache.batch_repeat_interleave(5)
    assert used(cache) == groups * 2
    fill(cache, 5, 1)  # into the second block, of which each row needs its own
    assert used(cache) == groups * (1 + 5)


def test_reset_gives_back_every_block() -> None:
    cache = paged("mixed")
    fill(cache, 3, 10)
    cache.reset()
    assert used(cache) == 0
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)
    fill(cache, 2, 3)
    assert cache.get_seq_length() == 3


def test_deepcopy_shares_until_written() -> None:
    cache = paged()
    fill(cache, 2, 6)
    before, blocks = contents(cache), used(cache)
    fork = copy.deepcopy(cache)
    assert used(cache) == blocks
    fill(fork, 2, 1, seed=1)
    assert used(cache) == blocks + 2  # one block a row
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), before, strict=True))
    fill(cache, 2, 1, seed=2)
    for ours, theirs, old in zip(contents(cache), contents(fork), before, strict=True):
        assert torch.equal(ours[:, :, :6], old)
        assert torch.equal(theirs[:, :, :6], old)
        assert not torch.equal(ours[:, :, 6], theirs[:, :, 6])
    del fork
    check_blocks(cache)


def test_pages_are_freed_with_the_cache() -> None:
    """At once, and not when the garbage collector next runs: each generate() makes a cache."""
    gc.disable()
    try:
        cache = paged("mixed")
        fill(cache, 1, 5)
        pages = [weakref.ref(group.storages[i]) for i, group in enumerate(cache.pages.groups)]
        del cache
        assert [page() for page in pages] == [None, None]
    finally:
        gc.enable()


def test_pickle() -> None:
    cache = paged("mixed")
    fill(cache, 2, 6)
    other = pickle.loads(pickle.dumps(cache))
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), contents(other), strict=True))
    fill(other, 2, 3, seed=1)
    fill(cache, 2, 3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), contents(other), strict=True))


# -- a fixed capacity ----------------------------------------------------------------------------------


def test_out_of_blocks_changes_nothing() -> None:
    cache = paged(max_tokens=4 * BLOCK)
    fill(cache, 2, 6)
    before = contents(cache)
    with pytest.raises(OutOfBlocksError, match=r"all 4 blocks of 4 tokens .*max_tokens"):
        fill(cache, 2, 3)
    assert cache.get_seq_length() == 6
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), before, strict=True))
    check_blocks(cache)
    fill(cache, 2, 2)
    cache.crop(-5)
    fill(cache, 2, 5)
    assert cache.get_seq_length() == 8


def test_a_count_to_crop_may_be_a_tensor() -> None:
    cache = paged()
    fill(cache, 1, 6)
    cache.crop(-torch.tensor(2))
    fill(cache, 1, 3, seed=1)
    assert (cache.get_seq_length(), used(cache)) == (7, 2)
    assert type(cache.padded.num_columns) is int
    check_blocks(cache)


def test_out_of_blocks_takes_back_what_other_rows_got() -> None:
    cache = paged(max_tokens=5 * BLOCK)
    fill(cache, 2, 6)
    before = contents(cache)
    with pytest.raises(OutOfBlocksError):
        fill(cache, 2, 3)  # the first row finds the fifth block, the second none
    assert used(cache) == 4
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), before, strict=True))
    fill(cache, 2, 2)
    check_blocks(cache)


@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_out_of_blocks_on_the_first_pass(kind: str) -> None:
    cache = paged(kind, max_tokens=2 * BLOCK)
    with pytest.raises(OutOfBlocksError):
        fill(cache, 1, 3 * BLOCK)
    cache.reset()
    fill(cache, 2, BLOCK)
    assert used(cache) == 2 * len(cache.pages.groups)


def test_grows_as_needed() -> None:
    cache = paged(capacity=1)
    keys, _ = fill(cache, 3, 50)
    assert keys.shape == (3, HEADS, 50, DIM)
    assert cache.statistics()["blocks_allocated"] >= 3 * 13


# -- a pass that stops half-way ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("between", "length"),
    [
        (lambda cache: cache, 8),
        (lambda cache: cache.crop(-1), 7),
        (lambda cache: cache.batch_repeat_interleave(1), 8),
        (lambda cache: cache.reorder_cache(torch.tensor([0])), 8),
        (copy.deepcopy, 8),
    ],
)
def test_half_a_pass_is_taken_back(between: Callable[[PagedCache], PagedCache | None], length: int) -> None:
    cache = paged()
    fill(cache, 1, 6)
    before = contents(cache)
    states = torch.ones(1, HEADS, 3, DIM)
    cache.update(states, states, 0)  # and then the model raised
    cache = between(cache) or cache
    fill(cache, 1, 2, seed=5)
    assert cache.get_seq_length() == length
    for now, old in zip(contents(cache), before, strict=True):
        assert torch.equal(now[:, :, : length - 2], old[:, :, : length - 2])


def test_fork_that_fails_leaves_no_prefix() -> None:
    """Blocks that were planned for, and never written, are forgotten with the fork that planned them."""
    cache = paged()
    fork = copy.deepcopy(cache)
    ids = torch.arange(9)[None]
    fork.prepare(1, 9, device=ids.device, token_ids=ids)  # and then the model raised
    assert cache.has_prefixes
    del fork
    assert not cache.has_prefixes


IDS, SHOWN = torch.arange(12)[None], torch.ones(1, 12, dtype=torch.bool)


def two_forks() -> tuple[Told, Told]:
    """Of six tokens under the salt "a"."""
    first = Told(paged())
    first.start(IDS[:, :6], SHOWN[:, :6], b"a")
    second = copy.deepcopy(first)
    first.others, second.others = [second.cache], [first.cache]
    return first, second


def test_forks_share_what_they_compute() -> None:
    first, second = two_forks()
    second.go_on(IDS[:, 6:], SHOWN[:, 6:])
    before = first.cache.statistics()["prefix_hits"]
    first.start(IDS, SHOWN, b"a")
    assert first.cache.statistics()["prefix_hits"] - before >= 3


def test_forks_under_different_salts() -> None:
    """They share the index; neither takes over what the other computed, whichever was first, next or last."""
    first, second = two_forks()
    second.start(IDS[:, :6], SHOWN[:, :6], b"b")
    first.go_on(IDS[:, 6:], SHOWN[:, 6:])  # under "a", while the index is about "b"
    for told, salt in ((second, b"b"), (first, b"a"), (second, b"a"), (second, b"b"), (first, b"b")):
        told.start(IDS, SHOWN, salt)
    second.start(IDS, SHOWN, b"a")
    first.cache.reset()
    first.ids, first.mask = IDS[:, :0], SHOWN[:, :0]
    first.go_on(IDS, SHOWN)  # still under "b", without being told so again


def test_rows_of_another_salt_are_no_prefix() -> None:
    told = Told(paged())
    told.start(IDS[:, :6], SHOWN[:, :6], b"a")
    told.cache.pages.use_salt(b"b")
    told.go_on(IDS[:, 6:], SHOWN[:, 6:])
    assert not told.cache.has_prefixes


@pytest.mark.long
def test_unfinished_pass_at_the_end_of_the_program() -> None:
    """A cache that is left with padding and half a pass, held by an exception, must not take the program down."""
    program = (
        "import torch; from transformers import LlamaConfig, LlamaForCausalLM; import hf_accel\n"
        "config = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=8, vocab_size=9)\n"
        "model = hf_accel.patch(LlamaForCausalLM(config).eval(), weights=None)\n"
        "cache = hf_accel.PagedCache(config)\n"
        "model.model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0)\n"
        "try: model(torch.ones(2, 3).long(), attention_mask=torch.ones(2, 3).tril(), past_key_values=cache)\n"
        "except ZeroDivisionError as error: kept = error\n"
    )
    root = Path(hf_accel.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True)


def test_attention_that_did_not_read_the_pages_is_an_error() -> None:
    cache = paged()
    states = torch.ones(1, HEADS, 3, DIM)
    cache.prepare(1, 3, device=states.device)
    cache.update(states, states, 0)
    with pytest.raises(UnsupportedError, match=r"layer 0 did not read the paged cache.*cache=None"):
        cache.update(states, states, 1)


# -- statistics and the rest of the protocol -----------------------------------------------------------


def test_statistics() -> None:
    cache = paged(capacity=40)
    fill(cache, 2, 6)
    assert cache.statistics() == {
        "block_size": BLOCK,
        "blocks_used": 4,
        "blocks_allocated": 10,
        "kv_bytes": 4 * BLOCK * LAYERS * 2 * HEADS * DIM * 4,
        "waste": 1 - 12 / 16,
        "prefix_lookups": 0,
        "prefix_hits": 0,
    }


def test_waste_counts_a_shared_block_once() -> None:
    cache = paged()
    fill(cache, 1, 6)
    cache.batch_repeat_interleave(3)
    assert cache.statistics()["waste"] == 1 - 6 / 8


def test_protocol() -> None:
    cache = paged("mixed")
    assert not cache.is_initialized
    assert len(cache.layers) == LAYERS
    assert cache.layers[0].keys is None
    fill(cache, 2, 5)
    assert cache.is_initialized
    assert cache.is_sliding == DynamicCache(config=CONFIGS["mixed"]).is_sliding
    assert cache.get_mask_sizes(3, 0) == (8, 0)
    assert cache.get_max_length() == -1
    assert cache.layers[0].keys.shape == (2, HEADS, 5, DIM)
    assert torch.equal(cache.layers[1].values, cache.layers[1].columns()[1])
    cache.reset()
    assert not cache.is_initialized  # Gemma 3 and PaliGemma look whether the pass is the first over a prompt


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (CONFIGS["full"], [None, None]),
        (CONFIGS["sliding"], [WINDOW, WINDOW]),
        (CONFIGS["mixed"], [WINDOW, None]),
    ],
)
def test_layer_windows(config: PreTrainedConfig, windows: list[int | None]) -> None:
    assert model_kinds(config).windows == windows


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            LlamaConfig(hidden_size=32, num_hidden_layers=2, layer_types=["linear_attention"] * 2),
            "cannot hold a Linear",
        ),
    ],
)
def test_layers_that_cannot_be_paged(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"({reason}).*use transformers' own cache"):
        PagedCache(config)


def test_bad_input() -> None:
    with pytest.raises(UnsupportedError, match="not both"):
        PagedCache(CONFIGS["full"], CacheConfig(), block_size=8)
    cache = paged()
    fill(cache, 2, 5)
    with pytest.raises(ValueError, match=r"crop\(3\) must be negative"):
        cache.crop(3)
    with pytest.raises(UnsupportedError, match=r"holds 2 sequences and the input has 3; call cache.reset\(\)"):
        fill(cache, 3, 1)
    with pytest.raises(UnsupportedError, match="offload"):
        cache.layers[0].offload()
    assert cache.get_seq_length() == 5


def test_bad_masks() -> None:
    cpu = torch.device("cpu")
    cache = paged()
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, :2] = False
    cache.prepare(2, 5, device=cpu, mask=mask)
    for layer in cache.paged_layers:
        layer.num_columns = 5  # as after a whole pass
    with pytest.raises(UnsupportedError, match=r"no attention_mask; pass attention_mask \[2, 6\]"):
        cache.prepare(2, 1, device=cpu)
    with pytest.raises(UnsupportedError, match=r"shape \(2, 5\).*must be \(2, 6\)"):
        cache.prepare(2, 1, device=cpu, mask=mask)
    with pytest.raises(UnsupportedError, match="start from an empty cache"):
        cache.prepare(2, 1, device=cpu, mask=torch.ones(2, 6, dtype=torch.bool))
    cache.prepare(2, 1, device=cpu, mask=torch.cat([mask, mask[1:].new_ones(2, 1)], 1))


def test_crop_behind_a_window_is_refused() -> None:
    cache = paged("sliding")
    fill(cache, 1, 30)
    fill(cache, 1, 1)  # lets go of all before token 30 - WINDOW + 1, whole blocks
    before = used(cache)
    with pytest.raises(UnsupportedError, match=r"sliding window of 8 needs those from 15 on.*from 20 on"):
        cache.crop(-9)
    assert (cache.get_seq_length(), used(cache)) == (31, before)
    cache.crop(-4)
    assert cache.get_seq_length() == 27


def other_cache(change: dict[str, Any]) -> PagedCache:
    return PagedCache(LlamaConfig(**{**DECODER, **change}))


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1}, {"num_hidden_layers": 3}], ids=str)
@pytest.mark.parametrize("patched", [True, False])
def test_a_cache_for_another_number_of_layers(change: dict[str, Any], patched: bool) -> None:
    """One too many looks to an unpatched model's cache like a pass that stopped, which went on from nothing."""
    model = build("llama")
    if patched:
        hf_accel.patch(model, weights=None)
    with pytest.raises(UnsupportedError, match=r"make it with hf_accel.PagedCache\(model.config\)"):
        model.generate(prompts(1, 5), past_key_values=other_cache(change), max_new_tokens=3)


@pytest.mark.parametrize("call", ["generate", "forward"])
def test_a_cache_with_another_window(call: str) -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    run = partial(model.generate, max_new_tokens=2) if call == "generate" else model
    cache = PagedCache(MistralConfig(**DECODER, sliding_window=3))
    text = "for 2 layers with a window of 3, and the model has 2 layers without a window; make it with"
    with pytest.raises(UnsupportedError, match=text):
        run(prompts(1, 5), past_key_values=cache)
    again = PagedCache(model.config)
    assert run(prompts(1, 5), past_key_values=again) is not None


def test_a_first_pass_that_was_interrupted_can_be_reset() -> None:
    """As the error says."""
    model = build("llama")
    cache, ids = PagedCache(model.config), prompts(1, 5)
    cache.update(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8), 0)
    with pytest.raises(
        UnsupportedError, match=r"layer 1 .* if its first pass was interrupted, call the cache's reset"
    ):
        model(ids, past_key_values=cache)
    cache.reset()
    assert torch.equal(model(ids, past_key_values=cache).logits, model(ids, past_key_values=DynamicCache()).logits)
