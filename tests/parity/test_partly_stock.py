"""Models of which a part stays stock: the plan says which and why, and nothing they compute changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    ProphetNetConfig,
    ProphetNetForConditionalGeneration,
)

import hf_accel
from hf_accel.kernels import cpu as kernels

from ..families import inputs as family_inputs
from ..families import models
from .families import DECODER, PADDING, VOCABULARY, inputs, prompts
from .older import by_stock_alone
from .snapshot import snapshot

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.25,
    "pad_token_id": PADDING,
    "eos_token_id": None,
}


def gpt() -> PreTrainedModel:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.25}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": PADDING, "eos_token_id": None}
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes, **tokens))


def bert() -> PreTrainedModel:
    return BertForSequenceClassification(BertConfig(**TINY, intermediate_size=64, num_labels=3))


def llama_classifier() -> PreTrainedModel:
    return LlamaForSequenceClassification(LlamaConfig(**DECODER, num_labels=3))


def prophet() -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "init_std": 0.25, "bos_token_id": None, "eos_token_id": None}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_ffn_dim": 64, f"num_{part}_layers": 2, f"num_{part}_attention_heads": 4}
    tokens = {"pad_token_id": PADDING, "decoder_start_token_id": PADDING}
    return ProphetNetForConditionalGeneration(ProphetNetConfig(**sizes, **tokens))


def build(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    return make().eval()


@torch.no_grad()
def run(model: PreTrainedModel) -> Tensor:
    if model.can_generate():
        return model.generate(**inputs("left"), max_new_tokens=10, do_sample=False)
    return model(**inputs("left")).logits


STOCK: dict[Callable[[], PreTrainedModel], dict[str, str]] = {  # topic -> what the reason must say
    gpt: {"attention": "AttentionInterface"},
    prophet: {"attention": "AttentionInterface", "cache": "AttentionInterface", "generate": "no paged cache"},
    bert: {},
    llama_classifier: {},
}


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.parametrize("make", STOCK)
def test_plan_says_why(make: Callable[[], PreTrainedModel]) -> None:
    choices = hf_accel.plan(build(make)).to_dict()["choices"]
    stock = {choice["topic"]: choice["reason"] for choice in choices if choice["choice"] == "stock"}
    assert stock.keys() == STOCK[make].keys()
    for topic, reason in STOCK[make].items():
        assert reason in stock[topic]


@pytest.mark.parametrize("make", STOCK)
def test_nothing_changes(make: Callable[[], PreTrainedModel]) -> None:
    model = build(make)
    expected = run(model)
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(run(model), expected)
    hf_accel.unpatch(model)
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize("make", [gpt, prophet])
def test_attention_stays_stock(make: Callable[[], PreTrainedModel]) -> None:
    model = build(make)
    implementation = model.config._attn_implementation
    hf_accel.patch(model, weights=None)
    assert model.config._attn_implementation == implementation
    assert not any("_hf_accel_attention" in vars(module) for module in model.modules())


@pytest.mark.parametrize("make", [bert, llama_classifier])
def test_quantized(make: Callable[[], PreTrainedModel]) -> None:
    model = build(make)
    expected = run(model)
    hf_accel.patch(model, weights="int8")
    assert 0 < (run(model) - expected).norm() / expected.norm() < 0.05
    hf_accel.unpatch(model)
    assert torch.equal(run(model), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("make", STOCK)
@pytest.mark.parametrize("weights", [None, "int8"])
def test_undo(make: Callable[[], PreTrainedModel], weights: str | None) -> None:
    model = build(make)
    if not model.config.is_encoder_decoder:
        before = snapshot(model)
        run(hf_accel.patch(model, weights=weights))
        hf_accel.unpatch(model)
        assert snapshot(model) == before
    else:
        expected = run(model)
        run(hf_accel.patch(model, weights=weights))
        hf_accel.unpatch(model)
        assert torch.equal(run(model), expected)


@pytest.mark.parametrize(
    ("make", "keyword"),
    [(bert, "cache"), (prophet, "cache"), (prophet, "attention"), (gpt, "attention")],
)
def test_explicit_request_is_an_error(make: Callable[[], PreTrainedModel], keyword: str) -> None:
    model = build(make)
    value = {"cache": "paged", "attention": "sdpa"}[keyword]
    with pytest.raises(hf_accel.UnsupportedError, match=rf"{keyword}= was asked for, but .*; leave {keyword}= out"):
        hf_accel.patch(model, **{keyword: value})
    assert not hf_accel.is_patched(model)


def test_a_model_of_text_and_images() -> None:
    """It has no one input embedding, and makes no text."""
    text = {"vocab_size": VOCABULARY, "eos_token_id": 2, "bos_token_id": None, "pad_token_id": PADDING}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(text_config=text | sizes, vision_config={**sizes, "image_size": 16, "patch_size": 8})
    model = CLIPModel(config).eval()
    given = {"input_ids": prompts(2, 6), "pixel_values": torch.randn(3, 3, 16, 16)}
    with torch.no_grad():
        expected = model(**given).logits_per_text
        hf_accel.patch(model, weights=None)
        assert torch.allclose(model(**given).logits_per_text, expected, atol=1e-5)


def test_what_needs_pages_is_refused_in_our_words() -> None:
    """And what stock runs without them still runs: see test_nothing_changes."""
    model = hf_accel.patch(build(prophet), weights=None)
    with pytest.raises(hf_accel.UnsupportedError, match=r"speculative= .*AttentionInterface.*leave speculative= out"):
        model.generate(**inputs("left"), max_new_tokens=2, speculative="ngram")
    run(model)
    assert hf_accel.stats(model)["loop"].startswith("stock: ")
    for call in (model.generate_batch, lambda ids: model.generate_batch(ids, speculative="ngram")):
        with pytest.raises(hf_accel.UnsupportedError, match=r"cannot serve .* or without: .*call generate\(\)"):
            call([[1, 2]])
    with pytest.raises(hf_accel.UnsupportedError, match="is an encoder-decoder"):
        model.init_continuous_batching()


def test_layers_with_a_state_that_is_not_known_have_no_pages() -> None:
    config = MiniMaxConfig(
        **TINY, intermediate_size=64, num_key_value_heads=2, head_dim=8, num_local_experts=2,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    model = build(lambda: MiniMaxForCausalLM(config))
    model.model.layers[0].self_attn.key_decay *= 0.5  # is not what we compute with
    expected = run(model)
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(run(model), expected)
    with pytest.raises(hf_accel.UnsupportedError, match=r"keeps a state that has no pages \(linear_attention\)"):
        model.generate_batch([[1, 2]])
    with pytest.raises(hf_accel.UnsupportedError, match="leave speculative= out"):
        model.generate(**inputs("left"), speculative="suffix")
    assert "generate" not in vars(hf_accel.unpatch(model)) and torch.equal(run(model), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # it calls that
def test_a_model_with_a_generate_of_its_own() -> None:
    """Its methods have the names of transformers' and other parameters."""
    family = models.classes().get("DiffusionGemmaForBlockDiffusion")
    if family is None:
        pytest.skip("this transformers does not have it")
    with by_stock_alone():
        stock, given = models.build(family), family_inputs.prompts("vision")
    patched = hf_accel.patch(models.build(family), weights=None)
    assert type(patched) is type(stock)

    def text(model: Any) -> Tensor:
        torch.manual_seed(0)
        return model.generate(**given, max_new_tokens=6).sequences

    assert torch.equal(text(patched), text(stock))
