"""A KV cache in INT8: what it loses, and that nothing depends on how the prompt was cut."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import PreTrainedModel

import hf_accel

from .families import FAMILIES, build, inputs

INT8 = hf_accel.CacheConfig(block_size=4, dtype="int8")


@functools.cache
def pair(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    return build(family), hf_accel.patch(build(family), weights=None, cache=INT8)


@pytest.mark.parametrize("layout", ["single", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_lose_little(family: str, layout: str) -> None:
    """Rounding K and V to within 1/254 of each head's largest value moves logits by a few hundredths of their size."""
    stock, patched = pair(family)
    given = inputs(layout)
    tokens = given["attention_mask"].bool()
    cache = hf_accel.PagedCache(patched.config, INT8)
    with torch.no_grad():
        expected = stock(**given).logits[tokens]
        actual = patched(**given, past_key_values=cache).logits[tokens]
    error = (actual - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert 0 < error < 0.02


@pytest.mark.parametrize("layout", ["single", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunking_changes_nothing(family: str, layout: str) -> None:
    """Prefill reads the rounded keys and values too, as decode does."""
    _, patched = pair(family)
    settings = {"do_sample": False, "max_new_tokens": 16}
    whole = patched.generate(**inputs(layout), **settings)
    for size in (1, 5):
        assert torch.equal(patched.generate(**inputs(layout), **settings, prefill_chunk_size=size), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes(family: str) -> None:
    """D + 4 bytes a token and head, a float32 scale with D integers, against 4 * D."""
    _, patched = pair(family)
    config = patched.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = []
    for dtype in ("int8", "auto"):
        cache = hf_accel.PagedCache(config, block_size=4, dtype=dtype)
        with torch.no_grad():
            patched(**inputs("single"), past_key_values=cache)
        sizes.append(cache.statistics()["kv_bytes"])
    assert sizes[0] / sizes[1] == pytest.approx((head_dim + 4) / (4 * head_dim))
