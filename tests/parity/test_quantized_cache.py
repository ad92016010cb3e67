"""A KV cache in INT8 and INT4: what it loses, and that nothing depends on how the prompt was cut."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import PreTrainedModel

import hf_accel
from hf_accel.config import KVDtype

from .families import FAMILIES, build, inputs

# The most that logits may move, as a share of their size: a step is 1/127 or 1/7.5 of each head's largest value.
LOST: dict[KVDtype, float] = {"int8": 0.02, "int4": 0.25, "int8-int4": 0.15}
pytestmark = pytest.mark.parametrize("dtype", LOST)


@functools.cache
def pair(family: str, dtype: KVDtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    settings = hf_accel.CacheConfig(block_size=4, dtype=dtype)
    return build(family), hf_accel.patch(build(family), weights=None, cache=settings)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["single", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_lose_little(family: str, layout: str, dtype: KVDtype) -> None:
    stock, patched = pair(family, dtype)
    given = inputs(layout)
    tokens = given["attention_mask"].bool()
    cache = hf_accel.PagedCache(patched.config, block_size=4, dtype=dtype)
    with torch.no_grad():
        expected = stock(**given).logits[tokens]
        actual = patched(**given, past_key_values=cache).logits[tokens]
    error = (actual - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert 0 < error < LOST[dtype]


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["single", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunking_changes_nothing(family: str, layout: str, dtype: KVDtype) -> None:
    """Prefill reads the rounded keys and values too, as decode does."""
    _, patched = pair(family, dtype)
    settings = {"do_sample": False, "max_new_tokens": 16}
    whole = patched.generate(**inputs(layout), **settings)
    for size in (1, 5):
        assert torch.equal(patched.generate(**inputs(layout), **settings, prefill_chunk_size=size), whole)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes(family: str, dtype: KVDtype) -> None:
    """D + 4 bytes a token and head, a float32 scale with D integers, or D / 2 + 8, against 4 * D."""
    _, patched = pair(family, dtype)
    config = patched.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = []
    for each in (dtype, "auto"):
        cache = hf_accel.PagedCache(config, block_size=4, dtype=each)
        with torch.no_grad():
            patched(**inputs("single"), past_key_values=cache)
        sizes.append(cache.statistics()["kv_bytes"])
    assert sizes[0] / sizes[1] == pytest.approx(
        {"int8": head_dim + 4, "int4": head_dim / 2 + 8, "int8-int4": 3 / 4 * head_dim + 6}[dtype] / (4 * head_dim)
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_generate_gives_the_same_tokens(family: str, dtype: KVDtype) -> None:
    """A batch, its rows alone, speculation with rejected drafts, an Engine with few blocks, several of one prompt."""
    _, patched = pair(family, dtype)
    given, settings = inputs("left"), {"do_sample": False, "max_new_tokens": 12}
    whole = patched.generate(**given, **settings)
    columns = given["input_ids"].shape[1]
    prompts = [
        ids[mask.bool()].tolist() for ids, mask in zip(given["input_ids"], given["attention_mask"], strict=True)
    ]
    expected = [row[columns:].tolist() for row in whole]
    for prompt, tokens in zip(prompts, expected, strict=True):
        alone = patched.generate(torch.tensor([prompt]), **settings)
        assert alone[0, len(prompt) :].tolist() == tokens[: alone.shape[1] - len(prompt)]
    drafted = patched.generate(**given, **settings, prompt_lookup_num_tokens=3)
    assert torch.equal(drafted, whole)
    with hf_accel.Engine(patched, max_tokens=64) as engine:
        requests = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
        answers = [list(request) for request in requests]
    assert all(a == e[: len(a)] and a for a, e in zip(answers, expected, strict=True))
    beams = patched.generate(torch.tensor([prompts[0]]), **settings, num_beams=3)
    again = patched.generate(torch.tensor([prompts[0]]), **settings, num_beams=3, prefill_chunk_size=2)
    assert torch.equal(beams, again)
