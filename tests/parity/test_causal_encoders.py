"""Decoders as embedders call them, whose tokens see those before them: without a cache, or with one that is empty."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_accel
from hf_accel.fused.hf.encoder_checks import is_empty
from hf_accel.kernels import cpu as kernels
from tests.families.models import enliven

from .snapshot import snapshot
from .test_encoders import batch, counted, module_by_module, same, same_states_and_attentions
from .test_gated_encoders import LAYERS, check_layouts, limit_rows

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "num_hidden_layers": 3, "max_position_embeddings": 80, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {}, "Qwen2": {}, "Llama": {}, "Mistral": {"sliding_window": 5}, "Gemma2": GEMMA, "Gemma3Text": GEMMA,
}  # fmt: skip
LENGTHS = {"padded": [11, 3, 7, 1], "none": [9, 9], "alone": [13], "one token": [1], "many rows": [70, 66, 5]}


def build(
    family: str = "Qwen3", dtype: torch.dtype = torch.float32, *, kind: str = "Model", **changes: Any
) -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | changes)
    if family == "Gemma2":  # older transformers takes sdpa, which does not cap
        config._attn_implementation = "eager"
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(
        transformers, f"{family.removesuffix('Text') if kind != 'Model' else family}{kind}"
    )(config)
    enliven(model)
    return model.to(dtype).eval()


def padded(lengths: list[int], side: str, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = batch(lengths)
    return {name: value if side == "right" else value.flip(1) for name, value in given.items()} | options


def test_stock_windows_and_causality_matter_here() -> None:
    given = padded([30], "right")
    with torch.no_grad():
        narrow, wide = (build("Mistral", sliding_window=w)(**given).last_hidden_state for w in (5, 100))
        first = build("Mistral")(given["input_ids"][:, :9]).last_hidden_state
    assert not torch.allclose(narrow, wide, atol=1e-2)
    torch.testing.assert_close(narrow[:, :9], first, rtol=1e-4, atol=1e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_outputs_are_stocks(family: str, dtype: torch.dtype) -> None:
    stock, ours = build(family, dtype), hf_accel.patch(build(family, dtype), weights=None)
    layouts = [padded(each, side, use_cache=False) for each in LENGTHS.values() for side in ("right", "left")]
    check_layouts(stock, ours, layouts, 2e-5 if dtype is torch.float32 else 0.06)


@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}], ids=str)
@pytest.mark.parametrize("family", ["Qwen3", "Gemma3Text"])
@torch.no_grad()
def test_quantized_layers_are_those_of_their_modules(family: str, weights: Any) -> None:
    ours, given = hf_accel.patch(build(family), weights=weights), padded([11, 3, 7, 1], "left", use_cache=False)
    with counted() as calls:
        found = ours(**given)
    assert calls == LAYERS
    with module_by_module():
        expected = ours(**given)
    same(found, expected, given["attention_mask"], 0.02)


@pytest.mark.covering(1)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_empty_cache_is_filled(family: str, dtype: torch.dtype, side: str) -> None:
    """It holds what stock's does at tokens, and the next tokens are those of stock."""
    stock, ours = build(family, dtype), hf_accel.patch(build(family, dtype), weights=None)
    given, tolerance = padded([11, 3, 7], side), 2e-5 if dtype is torch.float32 else 0.06
    real = given["attention_mask"].bool()
    for most in (None, 0):
        if most is not None:
            limit_rows(ours, most)
        with counted() as calls:
            found = ours(**given)
        expected = stock(**given)
        assert calls == LAYERS
        same(found, expected, given["attention_mask"], tolerance)
        pairs = list(zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True))
        for one, other in pairs:
            assert type(one) is type(other) and one.keys.shape == other.keys.shape
            kept = real[:, -one.keys.shape[2] :]
            for mine, theirs in ((one.keys, other.keys), (one.values, other.values)):
                got, wanted = mine.transpose(1, 2)[kept], theirs.transpose(1, 2)[kept]
                torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))
        if side == "left":
            following = {
                "input_ids": torch.tensor([[7], [8], [9]]),
                "attention_mask": torch.cat([given["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1),
            }
            with counted() as calls:
                next_one = ours(**following, past_key_values=found.past_key_values)
            assert not calls["layers"]
            same(next_one, stock(**following, past_key_values=expected.past_key_values), torch.ones(3, 1), tolerance)


class OtherCache(DynamicCache):
    """A cache of a user, which may do something with the keys."""


def another_layer(config: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers[1] = type("OtherLayer", (type(cache.layers[1]),), {})()
    return cache


CACHES: dict[str, tuple[Any, int]] = {  # and how many layers are native
    "another class": (lambda config: OtherCache(config=config), 0), "another layer": (another_layer, 2),
    "without a config": (lambda config: DynamicCache(), 3),
    "static": (lambda config: transformers.StaticCache(config=config, max_cache_len=30), 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_caches_of_users(kind: str) -> None:
    (make, native), given = CACHES[kind], padded([9, 9], "right")
    stock, ours = build(), hf_accel.patch(build(), weights=None)
    with counted() as calls:
        found = ours(**given, past_key_values=make(ours.config))
    assert calls["layers"] == native
    expected = stock(**given, past_key_values=make(stock.config))
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length() == 9
    same(found, expected, torch.ones(2, 9))


@torch.no_grad()
def test_a_filled_cache_is_stocks() -> None:
    stock, ours, ids = build(), hf_accel.patch(build(), weights=None), batch([9, 9])["input_ids"]
    begun = [model(ids[:, :3]).past_key_values for model in (ours, stock)]
    with counted() as calls:
        found = ours(ids[:, 3:], past_key_values=begun[0])
    assert not calls["layers"]
    same(found, stock(ids[:, 3:], past_key_values=begun[1]), torch.ones(2, 6))


def test_caches_that_are_not_empty() -> None:
    """One that moves its layers is none, and a layer that holds keys is none."""
    cache = DynamicCache()
    assert is_empty(cache, 0)
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    assert not is_empty(cache, 0) and is_empty(cache, 1)
    cache.offloading = True
    assert not is_empty(cache, 1)


@torch.no_grad()
def test_padding_within_a_row_counts_in_windows_alone() -> None:
    for family, native in (("Qwen3", 3), ("Mistral", 0)):
        stock, ours, given = build(family), hf_accel.patch(build(family), weights=None), batch([11, 7], holes=True)
        with counted() as calls:
            found = ours(**given, use_cache=False)
        assert calls["layers"] == native
        same(found, stock(**given, use_cache=False), given["attention_mask"])


@torch.no_grad()
def test_masks_of_users_are_stocks() -> None:
    stock, ours = build(), hf_accel.patch(build(), weights=None)
    ids = batch([9, 9])["input_ids"]
    both_ways, odd = torch.ones(2, 1, 9, 9, dtype=torch.bool), torch.ones(9, 9, dtype=torch.bool).tril()
    odd[5, 2] = False
    for mask in (both_ways, odd.expand(2, 1, 9, 9)):
        with counted() as calls:
            found = ours(ids, attention_mask=mask, use_cache=False)
        assert not calls["layers"]
        same(found, stock(ids, attention_mask=mask, use_cache=False), torch.ones(2, 9))


@torch.no_grad()
def test_several_texts_in_one_row_are_stocks() -> None:
    """Position ids that begin again divide a row."""
    stock, ours = build(), hf_accel.patch(build(), weights=None)
    ids, places = batch([9])["input_ids"], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    found = ours(ids, position_ids=places, use_cache=False)
    same(found, stock(ids, position_ids=places, use_cache=False), torch.ones(1, 9))


@torch.no_grad()
def test_positions_may_be_given() -> None:
    stock, ours = build(), hf_accel.patch(build(), weights=None)
    given = padded([9, 4], "left", use_cache=False)
    given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with counted() as calls:
        same(ours(**given), stock(**given), given["attention_mask"])
    assert calls == LAYERS


@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_a_classifier_reads_the_last_token(side: str) -> None:
    kind = "ForSequenceClassification"
    stock, ours = build(kind=kind), hf_accel.patch(build(kind=kind), weights=None)
    given = padded([11, 3, 7], side, use_cache=False)
    with counted() as calls:
        found = ours(**given)
    assert calls == LAYERS
    torch.testing.assert_close(found.logits, stock(**given).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_head_of_a_language_model_reads_padding_too() -> None:
    """A loss of all tokens counts what stock writes there."""
    stock, ours = build(kind="ForCausalLM"), hf_accel.patch(build(kind="ForCausalLM"), weights=None)
    for lengths, native in (([11, 3, 7], 0), ([9, 9], 3)):
        given = padded(lengths, "right", use_cache=False)
        with counted() as calls:
            found = ours(**given, labels=given["input_ids"])
        assert calls["layers"] == native
        expected = stock(**given, labels=given["input_ids"])
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_hidden_states_and_attentions() -> None:
    same_states_and_attentions(
        build(), hf_accel.patch(build(), weights=None), padded([11, 3, 7], "left", use_cache=False)
    )


@torch.no_grad()
def test_both_directions_of_gemma() -> None:
    """EmbeddingGemma is a decoder's class whose config makes its masks show both sides."""
    changes = {"use_bidirectional_attention": True, "sliding_window": 11}
    stock, ours = build("Gemma3Text", **changes), hf_accel.patch(build("Gemma3Text", **changes), weights=None)
    for lengths in LENGTHS.values():
        given = padded(lengths, "right", use_cache=False)
        with counted() as calls:
            found = ours(**given)
        assert calls == LAYERS
        same(found, stock(**given), given["attention_mask"])


@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_texts_of_clip(side: str) -> None:
    """They are pooled at the token that ends them, at the first place without one."""
    sizes = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    torch.manual_seed(0)
    stock: Any = transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes)).eval()
    enliven(stock)
    ours, given = hf_accel.patch(copy.deepcopy(stock), weights=None), padded([11, 3, 7], side)
    with counted() as calls:
        found = ours(**given)
    assert calls["layers"] == (3 if side == "right" else 0)
    same(found, stock(**given), given["attention_mask"])


def test_a_function_of_a_user_is_not_traced() -> None:
    """It would be called with stand-ins, and might keep them."""
    stock, ours, seen = build(), hf_accel.patch(build(), weights=None), list[Any]()

    def attention(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(query)
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *args, **kwargs)

    transformers.AttentionInterface.register("seeing_sdpa", attention)
    given = padded([9, 9], "right")
    with torch.no_grad(), counted() as calls:
        before = ours(**given)
        ours.set_attn_implementation("seeing_sdpa")
        found, expected = ours(**given), stock(**given)
    assert calls["layers"] == 3 and len(seen) == 3 and all(type(each) is Tensor for each in seen)
    same(found, expected, given["attention_mask"])
    same(found, before, given["attention_mask"])


def test_undo_copies_and_the_plan() -> None:
    model, given = build(), padded([12, 5], "left", use_cache=False)
    lines = {line.what: line for line in hf_accel.plan(model, weights=None).lines if line.topic == "fused"}
    assert lines["3 encoder layers"].choice == "one native call each"
    before = snapshot(model, given)
    hf_accel.patch(model, weights="int8", keep_original=True)
    with torch.no_grad():
        expected: Tensor = model(**given).last_hidden_state
        assert torch.equal(copy.deepcopy(model)(**given).last_hidden_state, expected)
    hf_accel.unpatch(model)
    assert snapshot(model, given) == before
