"""Plain forward passes of a patched model against stock, or against the same sequences one at a time."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

import hf_accel

from .families import FAMILIES, build, inputs, prompts

LENGTHS = (11, 1, 14, 4)  # of the sequences packed into one row


@functools.cache
def pair(family: str, attention: str = "auto") -> tuple[PreTrainedModel, PreTrainedModel]:
    patched = build(family)
    hf_accel.patch(patched, weights=None, attention=attention, cache=hf_accel.CacheConfig(block_size=4))
    return build(family), patched


@torch.no_grad()
def logits(model: PreTrainedModel, **given: Any) -> Tensor:
    return model(**given).logits


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize("layout", ["single", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding(family: str, layout: str, attention: str) -> None:
    stock, patched = pair(family, attention)
    given = inputs(layout)
    tokens = given["attention_mask"].bool()
    assert_close(logits(patched, **given)[tokens], logits(stock, **given)[tokens])


# -- packed sequences ----------------------------------------------------------------------------------


def packed() -> dict[str, Tensor]:
    return {
        "input_ids": prompts(1, sum(LENGTHS)),
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
    }


def one_by_one(model: PreTrainedModel) -> Tensor:
    rows = packed()["input_ids"].split(LENGTHS, dim=1)
    return torch.cat([logits(model, input_ids=row) for row in rows], dim=1)


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_by_position_ids(family: str, attention: str) -> None:
    stock, patched = pair(family, attention)
    assert_close(logits(patched, **packed(), use_cache=False), one_by_one(stock))


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2"])
def test_packed_by_cu_seq_lens(family: str, attention: str) -> None:
    stock, patched = pair(family, attention)
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    lengths = {f"cu_seq_lens_{x}": bounds for x in "qk"} | {f"max_length_{x}": max(LENGTHS) for x in "qk"}
    assert_close(logits(patched, **packed(), **lengths, use_cache=False), one_by_one(stock))


# -- masks and caches that the caller makes ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("family", FAMILIES)
def test_4d_mask(family: str, kind: str) -> None:
    """A tree: each token sees a random half of those before it, and itself."""
    stock, patched = pair(family)
    ids = prompts(2, 12)
    generator = torch.Generator().manual_seed(0)
    seen = (torch.rand(2, 1, 12, 12, generator=generator) < 0.5).tril() | torch.eye(12, dtype=torch.bool)
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = logits(stock, input_ids=ids, attention_mask=additive)  # Gemma-2's eager attention takes no other
    mask = seen if kind == "bool" else additive
    assert_close(logits(patched, input_ids=ids, attention_mask=mask), expected)
    assert (logits(patched, input_ids=ids) - expected).abs().max() > 0.1  # the mask does something


CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=40),
    "paged": lambda model: hf_accel.PagedCache(model.config, block_size=4),
    "small pages": lambda model: hf_accel.PagedCache(model.config, block_size=1, capacity=1),
}


def in_steps(model: PreTrainedModel, cache: Cache, layout: str) -> Tensor:
    """Logits of the columns in passes of 5, 4, 1, 1 and 2, over a cache."""
    given = inputs(layout)
    parts, start = [], 0
    for step in (5, 4, 1, 1, 2):
        columns = slice(start, start + step)
        mask = given["attention_mask"][:, : columns.stop]
        parts.append(
            logits(
                model,
                input_ids=given["input_ids"][:, columns],
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, columns],
                past_key_values=cache,
            )
        )
        start += step
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("layout", ["single", "left", "right"])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_cache_of_the_caller(family: str, kind: str, layout: str) -> None:
    stock, patched = pair(family)
    tokens = inputs(layout)["attention_mask"].bool()
    expected = in_steps(stock, DynamicCache(config=stock.config), layout)
    assert_close(in_steps(patched, CACHES[kind](patched), layout)[tokens], expected[tokens])


@pytest.mark.parametrize("layout", ["single", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_paged_cache_in_a_stock_model(family: str, layout: str) -> None:
    stock, _ = pair(family)
    expected = in_steps(stock, DynamicCache(config=stock.config), layout)
    actual = in_steps(stock, CACHES["paged"](stock), layout)
    tokens = inputs(layout)["attention_mask"].bool()
    assert_close(actual[tokens], expected[tokens])


# -- training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str, attention: str) -> None:
    gradients = []
    for model in pair(family, attention):
        given = inputs("left")
        counted = given["attention_mask"].bool()
        counted[:, 1:] &= counted[:, :-1].clone()  # what a padding column predicts differs with the implementation
        labels = given["input_ids"].masked_fill(~counted, -100)
        loss = model(**given, labels=labels).loss
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients.append(dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)
