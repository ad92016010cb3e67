"""Pages of a device whose memory must be taken at once: their number follows from what is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import hf_accel
from hf_accel import CacheConfig, OutOfBlocksError
from hf_accel.cache.hf import room
from hf_accel.cache.hf.room import fixed_settings, pass_bytes, share_settings, token_bytes
from hf_accel.distill.drafts import decoding
from hf_accel.generation.hf.session import Session
from hf_accel.hardware.device import pool_memory

from .families import FAMILIES, build
from .speculating import answers, by_engine, by_generate_batch, near, requests

CPU = torch.device("cpu")
PROMPTS = requests(6, longest=12, seed=3)


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(room, "pool_memory", lambda device: nbytes)
    monkeypatch.setattr(room, "GRAPH_BYTES", 0)


def patched(family: str = "llama", **cache: Any) -> Any:
    return hf_accel.patch(build(family), weights=None, cache=CacheConfig(**{"block_size": 4, **cache}))


def test_a_host_grows() -> None:
    settings = CacheConfig()
    assert pool_memory(CPU) is None
    assert fixed_settings(build("llama"), settings, CPU, rows=64) is settings


def test_torch_gives_back_what_it_does_not_use_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between tensors that are held stays with it: no large pool fits there."""
    free = [1000]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 9000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(free.pop() + 120))
    assert pool_memory(torch.device("cuda")) == 1120


@pytest.mark.parametrize("dtype", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_a_token(family: str, dtype: Any) -> None:
    """As many as the pages then take."""
    model = patched(family, dtype=dtype)
    session = Session(model, CacheConfig(block_size=4, dtype=dtype))
    session.add(_sequence())
    session.step()
    per_token = sum(group.nbytes / (group.pool.num_blocks * 4) for group in session.pages.groups)
    assert per_token == token_bytes(model, CacheConfig(block_size=4, dtype=dtype))


def _sequence() -> Any:
    from hf_accel.generation.request_settings import RequestSettings
    from hf_accel.generation.sampling.sampling import Sampling
    from hf_accel.generation.sequence import Sequence

    return Sequence([1, 2, 3], RequestSettings(2, Sampling()))


def test_all_that_is_free_but_what_passes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched()
    free(monkeypatch, 10_000_000)
    settings = fixed_settings(model, CacheConfig(block_size=4), CPU, rows=64)
    left = 10_000_000 * 0.95 - pass_bytes(model, 64)
    assert settings.max_tokens is not None and settings.max_tokens % 4 == 0
    assert 0 <= left - settings.max_tokens * token_bytes(model, CacheConfig()) < 4 * token_bytes(model, CacheConfig())
    fewer = fixed_settings(model, CacheConfig(block_size=4), CPU, rows=64, drafts=[model])
    assert fewer.max_tokens is not None and abs(2 * fewer.max_tokens - settings.max_tokens) <= 8
    assert fixed_settings(model, CacheConfig(max_tokens=40), CPU, rows=64).max_tokens == 40


def test_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As max_memory_percent= of transformers' ContinuousBatchingConfig asks for it."""
    model, settings = patched(), CacheConfig(block_size=4)
    assert share_settings(model, settings, CPU, rows=64, share=0.1) is settings  # a host has no pool
    free(monkeypatch, 10_000_000)
    tokens = share_settings(model, settings, CPU, rows=64, share=0.1).max_tokens
    assert tokens is not None and 0 <= 1_000_000 // token_bytes(model, settings) - tokens < 4
    assert share_settings(model, settings, CPU, rows=64, share=1.0) == fixed_settings(model, settings, CPU, rows=64)
    assert share_settings(model, CacheConfig(max_tokens=40), CPU, rows=64, share=0.1).max_tokens == 40
    asked = transformers.ContinuousBatchingConfig(max_memory_percent=0.1)
    with model.continuous_batching_context_manager(continuous_batching_config=asked) as manager:
        assert manager.session.pages.groups[0].pool.num_blocks * 4 <= tokens
    asked.max_memory_percent = 50.0
    with pytest.raises(hf_accel.UnsupportedError, match="above 0 and at most 1"):
        model.generate_batch(PROMPTS, continuous_batching_config=asked)


@pytest.mark.parametrize("draft", [False, True])
def test_few_tokens_fit(draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences wait and are preempted, as with any cache of a fixed size."""
    model = patched()
    per_token = token_bytes(model, CacheConfig())
    config = {"speculative": hf_accel.SpeculativeConfig(drafter=near("llama"), num_draft=2)} if draft else {}
    needed = 80 * per_token * (1 + draft) + pass_bytes(model, 2048)
    free(monkeypatch, round(needed / 0.95) + 10)
    assert by_generate_batch(model, PROMPTS, 24, **config) == answers("llama", PROMPTS, 24)
    stats = hf_accel.stats(model)
    assert stats["blocks_allocated"] == 20 and stats["preemptions"] > 0
    free(monkeypatch, round((80 * per_token * (1 + draft) + pass_bytes(model, 256)) / 0.95) + 10)
    tokens, stats = by_engine(model, PROMPTS, 24, **config)
    assert tokens == answers("llama", PROMPTS, 24) and stats["blocks_allocated"] == 20


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched()
    free(monkeypatch, 1000)
    words = (
        r"1,000 bytes of cpu are free, of which passes need [\d,]+, and a block .*; lower token_budget=.* max_tokens="
    )
    with pytest.raises(OutOfBlocksError, match=words):
        by_generate_batch(model, PROMPTS, 4)


@pytest.mark.parametrize("at_once", [None, 2])
def test_samples_for_a_student_leave_the_memory_to_the_training(
    monkeypatch: pytest.MonkeyPatch, at_once: int | None
) -> None:
    """Pages of a fixed size hold the longest sequences that are under way together; the tokens are the same."""
    model = patched()
    prompts, counts = [[1, 2, 3], [4, 5], [6] * 40], [3, 30, 5]
    made: list[int | None] = []

    class Recording(Session):
        def __init__(self, model: Any, cache: CacheConfig, **keywords: Any) -> None:
            made.append(cache.max_tokens)
            super().__init__(model, cache, **keywords)

    monkeypatch.setattr(decoding, "Session", Recording)
    decoder = decoding.Decoder(model, temperature=0.0, seed=1)
    expected = decoder.run(prompts, counts, at_once=at_once)
    free(monkeypatch, 10**9)
    assert decoder.run(prompts, counts, at_once=at_once) == expected
    needed = 45 + 32 + (6 if at_once is None else 0) + decoding.SPARE_TOKENS * (at_once or 3)
    assert made == [None, needed]
