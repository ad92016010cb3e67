"""Patched models under autocast, in float64, in another dtype than they were patched in: as stock computes there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_accel
from hf_accel.kernels import cpu as kernels

from .families import build, inputs, prompts

ROUNDING = {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 1e-5, torch.float64: 1e-12}
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def greedy(model: PreTrainedModel, **keywords: Any) -> Tensor:
    return model.generate(**inputs("left"), max_new_tokens=8, do_sample=False, **keywords)


@torch.no_grad()
def logits(model: PreTrainedModel, **keywords: Any) -> Tensor:
    """Of the tokens that are not padding."""
    given = inputs("left")
    return model(**given, **keywords).logits[given["attention_mask"].bool()]


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype is expected.dtype
    assert (got.double() - expected.double()).norm() <= ROUNDING[got.dtype] * expected.double().norm()


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", ["paged", None])
@pytest.mark.parametrize("autocast", [BF16, F16], ids=str)
@pytest.mark.parametrize(("family", "dtype"), [("llama", F32), ("llama", BF16), ("mistral", F32), ("gpt2", F32)])
def test_autocast(family: str, dtype: torch.dtype, autocast: torch.dtype, cache: str | None) -> None:
    """The rotation leaves Q and K wider than V."""
    model = build(family, dtype=dtype)
    with torch.autocast("cpu", dtype=autocast):
        expected, tokens = logits(model), greedy(model)
        hf_accel.patch(model, weights=None, cache=cache)
        assert_close(logits(model), expected)
        got = greedy(model)
    assert (got == tokens).float().mean() > 0.8  # one rounding may turn a token, and what follows it
    if cache is not None:
        assert hf_accel.stats(model)["loop"] == "ragged"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("dtype", "autocast"), [(F32, BF16), (F32, F16), (BF16, F16)])
def test_int8_layers_give_the_dtype_of_autocast(family: str, dtype: torch.dtype, autocast: torch.dtype) -> None:
    model = build(family, dtype=dtype)
    if family == "gpt2" and dtype is BF16:
        pytest.skip("stock's layer norm refuses it")
    with torch.autocast("cpu", dtype=autocast):
        expected = logits(model)
        got = logits(hf_accel.patch(model, weights="int8"))
    assert got.dtype is expected.dtype is autocast
    assert (got.float() - expected.float()).norm() < 0.06 * expected.float().norm()


@pytest.mark.parametrize("first", [True, False])
def test_a_cache_that_is_passed_between_calls_with_and_without_autocast(first: bool) -> None:
    """Stock's cache concatenates what comes in several dtypes, without a loss."""
    model, ids = build("llama"), prompts(2, 12)

    @torch.no_grad()
    def turns(cache: Any) -> list[Tensor]:
        results = []
        for number, part in enumerate(ids.split(4, dim=1)):
            with torch.autocast("cpu", dtype=BF16, enabled=(number % 2 == 0) is first):
                results.append(model(part, past_key_values=cache).logits)
        return results

    expected = turns(DynamicCache(config=model.config))
    hf_accel.patch(model, weights=None)
    for got, wanted in zip(turns(hf_accel.PagedCache(model.config)), expected, strict=True):
        assert got.dtype is wanted.dtype
        assert (got.float() - wanted.float()).norm() <= 0.02 * wanted.float().norm()


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_prefixes_are_not_shared_between_dtypes() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    ids, cache = prompts(1, 40), hf_accel.PagedCache(model.config)

    def turn() -> Tensor:
        cache.reset()
        return model.generate(
            ids, past_key_values=cache, max_new_tokens=2, do_sample=False, return_dict_in_generate=True,
            output_logits=True,
        ).logits[0]  # fmt: skip

    expected = turn()
    hits = cache.statistics()["prefix_hits"]
    with torch.autocast("cpu", dtype=BF16):
        rounded = turn()
        assert cache.statistics()["prefix_hits"] == hits
    assert torch.equal(turn(), expected)
    assert cache.statistics()["prefix_hits"] == hits
    assert not torch.equal(rounded, expected)
    assert torch.equal(turn(), expected)
    assert cache.statistics()["prefix_hits"] > hits  # and they are within one


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_float64_is_computed_by_stock_and_torch(family: str, weights: str | None) -> None:
    model = build(family, dtype=F64)
    expected = greedy(model)
    choices = hf_accel.plan(model, weights=weights).to_dict()["choices"]
    fused = next(choice for choice in choices if choice["topic"] == "fused")
    if kernels.refusal() is None:
        assert (fused["choice"], fused["reason"]) == ("stock", "the native calls do not compute in float64")
    hf_accel.patch(model, weights=weights)
    assert torch.equal(greedy(model), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize(("before", "after"), [(F32, BF16), (F32, F16), (BF16, F32), (F32, F64), (F64, F32)])
def test_another_dtype_after_patch(family: str, before: torch.dtype, after: torch.dtype) -> None:
    """.half(), .bfloat16(), .float(), .double(): as if the model had been patched in it."""
    model = build(family, dtype=before)
    fresh = hf_accel.patch(copy.deepcopy(model).to(after), weights=None)
    hf_accel.patch(model, weights=None)
    greedy(model)
    model.to(after)
    assert_close(logits(model), logits(fresh))
    assert torch.equal(greedy(model), greedy(fresh))
    hf_accel.unpatch(model)
    assert model.dtype is after


def test_a_cache_that_is_passed_along_while_the_model_changes_its_dtype() -> None:
    model, ids = hf_accel.patch(build("llama"), weights=None), prompts(1, 12)
    cache = hf_accel.PagedCache(model.config)
    with torch.no_grad():
        expected = model(ids).logits[:, -4:]
        model(ids[:, :8], past_key_values=cache)
        got = model.bfloat16()(ids[:, 8:], past_key_values=cache).logits
    assert got.dtype is BF16
    assert (got.float() - expected).norm() < 0.02 * expected.norm()
