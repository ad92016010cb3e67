"""What stands in the pages after drafts were rejected is what a pass over the final tokens alone writes there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_accel
from hf_accel import SpeculativeConfig
from hf_accel.cache.cached_sequence import CachedSequence
from hf_accel.cache.hf import page_groups
from hf_accel.cache.pages import Pages
from hf_accel.config import CacheConfig
from hf_accel.generation.batcher import Batcher
from hf_accel.generation.hf.drafting import make_speculation
from hf_accel.generation.hf.model_runner import ModelRunner
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.sequence import Sequence
from hf_accel.generation.speculation.controller import Controller
from hf_accel.kernels import cpu as kernels

from .families import FAMILIES, build
from .speculating import OracleDrafter, answers, near, requests, stock

NEW_TOKENS = 24
PROMPTS = requests(5, longest=14, seed=4, shared=9)


def batcher_of(model: Any, settings: CacheConfig, drafter: Any, num_draft: int) -> Batcher:
    groups, groups_of_layer = page_groups(model.config, settings)
    runner, pages = ModelRunner(model, groups, groups_of_layer), Pages(groups)
    config, lengths = SpeculativeConfig(drafter=drafter), Controller(num_draft)  # which may be 0
    return Batcher(runner, pages, make_speculation(config, runner, pages, lengths))


def held(batcher: Batcher, cached: CachedSequence, layer: int) -> tuple[Tensor, Tensor, int]:
    """K and V [T, H, D] of the tokens that a layer holds of a row, and which is the first."""
    runner: Any = batcher.runner
    (number,) = runner.groups_of_layer[layer]
    group, table = batcher.pages.groups[number], cached.tables[number]
    first = table.num_dropped_blocks * group.pool.block_size
    return *group.storages[layer].read(torch.tensor(table.slots(first, table.num_tokens))), first


@torch.no_grad()
def dense(family: str, tokens: list[int], layer: int) -> tuple[Tensor, Tensor]:
    """K and V [T, H, D] of stock."""
    cache = stock(family)(torch.tensor([tokens]), use_cache=True).past_key_values.layers[layer]
    return cache.keys[0].transpose(0, 1), cache.values[0].transpose(0, 1)


def assert_rows_hold_final_tokens(family: str, batcher: Batcher, model: Any) -> int:
    """Returns how many rows there were."""
    running = batcher.scheduler.running
    for sequence in running:
        assert sequence.cached is not None and sequence.cached.num_tokens == sequence.num_computed
        for layer in range(model.config.num_hidden_layers):
            keys, values, first = held(batcher, sequence.cached, layer)
            k, v = dense(family, sequence.tokens[: sequence.num_computed], layer)
            start = sequence.num_computed - len(k)  # stock keeps the window alone
            window = slice(max(0, first - start), None)
            torch.testing.assert_close(keys[max(0, start - first) :], k[window], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(values[max(0, start - first) :], v[window], rtol=1e-4, atol=1e-5)
    return len(running)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("block_size", "right"), [(1, 3), (4, 1), pytest.param(4, 0, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_after_rollback(family: str, right: int, block_size: int) -> None:
    model = hf_accel.patch(build(family), weights=None)
    expected = answers(family, PROMPTS, NEW_TOKENS)
    oracle = OracleDrafter(PROMPTS, expected, right)
    batcher = batcher_of(model, CacheConfig(block_size=block_size), oracle, 6)
    sequences = [Sequence(list(prompt), RequestSettings(NEW_TOKENS, Sampling())) for prompt in PROMPTS]
    arrivals = iter(sequences)
    checked = 0
    for number in itertools.count():
        for sequence in itertools.islice(arrivals, 5 if number == 3 else 1):
            batcher.add(sequence)
        if not batcher.has_work:
            break
        batcher.step()
        if number % 3 == 0:
            checked += assert_rows_hold_final_tokens(family, batcher, model)
    assert checked > 5
    assert [sequence.tokens[sequence.num_prompt :] for sequence in sequences] == expected
    assert all(group.pool.num_used == 0 for group in batcher.pages.groups)


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("drafter", ["self-int4", "near"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_pages_bit_for_bit(family: str, drafter: str, dtype: Any) -> None:
    """With row-invariant kernels the same bits as without drafts; the INT4 drafts stood in the very same slots."""
    model = hf_accel.patch(build(family), weights=None, deterministic=True)
    pages: list[dict[tuple[int, int], Any]] = []
    for number, source in enumerate([OracleDrafter([], []), near(family) if drafter == "near" else drafter]):
        batcher = batcher_of(model, CacheConfig(block_size=4, dtype=dtype), source, 5 * number)
        settings = RequestSettings(NEW_TOKENS, Sampling(), keeps_pages=True)
        sequences = [Sequence(list(prompt), settings) for prompt in PROMPTS]
        for sequence in sequences:
            batcher.add(sequence)
        while batcher.has_work:
            batcher.step()
        assert (batcher.speculation.statistics.drafted > batcher.speculation.statistics.accepted) == bool(number)
        found = {}
        for index, sequence in enumerate(sequences):
            assert sequence.kept_pages is not None and sequence.kept_pages.num_tokens == len(sequence.tokens) - 1
            for layer in range(2):
                keys, values, first = held(batcher, sequence.kept_pages, layer)
                found[index, layer] = (keys, values)
                assert first == 0
        pages.append(found)
    for place, (keys, values) in pages[0].items():
        assert torch.equal(keys, pages[1][place][0]) and torch.equal(values, pages[1][place][1])


def test_prefix_pages_never_change() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    batcher = batcher_of(model, CacheConfig(block_size=4), near("llama"), 5)
    group = batcher.pages.groups[0]
    known: dict[bytes, Any] = {}
    for prompt in requests(12, longest=14, seed=6, shared=9):
        batcher.add(Sequence(list(prompt), RequestSettings(NEW_TOKENS, Sampling())))
        for _ in range(4):
            batcher.step()
            assert group.index is not None
            for digest, block in group.index._blocks.items():
                now = [storage.pages.k[block].clone() for storage in group.storages.values()]
                assert all(torch.equal(a, b) for a, b in zip(now, known.setdefault(digest, now), strict=True))
    assert len(known) > 40 and batcher.pages.statistics()["prefix_hits"] > 0
