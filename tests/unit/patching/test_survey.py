from __future__ import annotations

import ast
import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)
from transformers.core_model_loading import WeightRenaming
from transformers.models.t5.modeling_t5 import T5DenseActDense

import hf_accel
from hf_accel import UnsupportedError
from hf_accel.linear.hf import lost_on_saving
from hf_accel.patching.attention_survey import attention_sites, cache_refusal, model_attention_refusal
from hf_accel.patching.survey import linear_sites

from ...parity.families import WINDOW, build

TINY: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def bert() -> PreTrainedModel:
    return BertForSequenceClassification(BertConfig(**TINY, intermediate_size=64, num_labels=5))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4))


def reasons(model: PreTrainedModel, *skip: str) -> dict[str, str | None]:
    return {site.name: site.skip for site in linear_sites(model, skip)}


def test_every_linear_of_a_llama() -> None:
    sites = list(linear_sites(build("llama"), ()))
    names = [f"model.layers.{i}.{n}" for i in range(2) for n in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )]  # fmt: skip
    assert [site.name for site in sites] == [*names, "lm_head"]
    assert [site.name for site in sites if site.is_head] == ["lm_head"]
    assert not any(site.is_tied or site.skip for site in sites)


def test_conv1d_is_seen_transposed() -> None:
    model = build("gpt2")
    sites = {site.name: site for site in linear_sites(model, ())}
    site = sites["transformer.h.0.attn.c_attn"]
    assert site.weight.shape == (96, 32)
    assert torch.equal(site.weight, model.transformer.h[0].attn.c_attn.weight.t())
    assert site.bias is model.transformer.h[0].attn.c_attn.bias
    head = sites["lm_head"]
    assert (head.is_head, head.is_tied, head.skip, head.bias) == (True, True, None, None)


def shared(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def like_the_embedding(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.weight = model.model.embed_tokens.weight


def subclass(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.__class__ = type("Special", (nn.Linear,), {})


def double(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.double()


def offloaded(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj._hf_hook = object()


def adapted(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].mlp
    layer.up_proj = nn.ModuleDict({"lora_A": nn.Linear(32, 4, bias=False), "base_layer": layer.up_proj})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (shared, {f"model.layers.{i}.mlp.up_proj": "shares its weight with another module" for i in range(2)}),
        (like_the_embedding, {"model.layers.0.mlp.up_proj": "shares its weight with another module"}),
        (subclass, {"model.layers.0.mlp.up_proj": "is a Special, not a plain Linear"}),
        (double, {"model.layers.0.mlp.up_proj": "has torch.float64 weights"}),
        (offloaded, {"model.layers.0.mlp.up_proj": "is moved between devices by accelerate"}),
        (adapted, {"model.layers.0.mlp.up_proj.lora_A": "is an adapter"}),
    ],
)
def test_reason_to_skip(change: Any, expected: dict[str, str]) -> None:
    model = build("llama")
    change(model)
    assert {name: reason for name, reason in reasons(model).items() if reason} == expected


@pytest.mark.parametrize(
    ("skip", "number"),
    [("up_proj", 2), ("mlp.up_proj", 2), ("layers.1.mlp.up_proj", 1), ("model.layers.1.mlp.up_proj", 1), ("proj", 0)],
)
def test_skip_by_end_of_name(skip: str, number: int) -> None:
    found = reasons(build("llama"), skip)
    assert [name.endswith("up_proj") for name, reason in found.items() if reason == "named in skip="] == [
        True
    ] * number


def test_skip_by_role() -> None:
    assert reasons(bert())["classifier"] == "is a classification head"
    assert reasons(bert())["bert.pooler.dense"] is None
    assert not [name for name, reason in reasons(t5()).items() if reason]  # of `wo` the dtype alone is read


class ReadsNumbers(T5DenseActDense):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states * self.wo.weight.abs().max())


def test_a_weight_whose_numbers_are_read_stays() -> None:
    model = t5()
    model.encoder.block[0].layer[1].DenseReluDense.__class__ = ReadsNumbers
    assert {name: reason for name, reason in reasons(model).items() if reason} == {
        "encoder.block.0.layer.1.DenseReluDense.wo": "has its weight read by the module around it"
    }


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # as transformers initializes these layers
@pytest.mark.parametrize("weights", ("int8", "int4"))
def test_layers_without_a_weight_stay(weights: Any) -> None:
    """Those of a DeepSeek V2 that has no shared expert, which stock adds as zeros."""
    sizes = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    more = {"n_shared_experts": 0, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    config = DeepseekV2Config(**TINY, **sizes, **more, first_k_dense_replace=0, intermediate_size=64)
    model = DeepseekV2ForCausalLM(config).eval()
    found = {name.rpartition(".")[2]: reason for name, reason in reasons(model).items() if "shared_experts" in name}
    has_none = "has no weights, as its shape is"
    assert found == dict.fromkeys(("gate_proj", "up_proj"), f"{has_none} [0, 32]") | {
        "down_proj": f"{has_none} [32, 0]"
    }
    hf_accel.patch(model, weights=weights)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        logits = model(ids).logits
        shared = model.model.layers[0].mlp.shared_experts
        assert torch.equal(shared(torch.ones(1, 2, 32)), torch.zeros(1, 2, 32))
    tokens = model.generate(ids, max_new_tokens=1, do_sample=False)
    assert tokens[0, -1] == logits[0, -1].argmax()


def test_experts_router() -> None:
    model = build("llama")
    model.config.num_experts = 7
    model.model.layers[0].mlp.gate = nn.Linear(32, 7, bias=False)
    assert {name for name, reason in reasons(model).items() if reason == "routes tokens to experts"} == {
        "model.layers.0.mlp.gate"
    }


def bidirectional() -> PreTrainedModel:
    config = copy.deepcopy(build("llama").config)
    config.is_causal = False
    return type(build("llama"))(config)


@pytest.mark.parametrize(
    ("make", "attention", "cache"),
    [
        (lambda: build("llama"), None, None),
        (lambda: build("gemma2"), None, None),
        (lambda: build("llama").model, None, "LlamaModel does not generate text"),
        (bert, None, "BertForSequenceClassification does not generate text"),
        (t5, None, None),
        (bidirectional, None, "is configured for bidirectional attention"),
        (
            lambda: FalconForCausalLM(FalconConfig(**TINY)),
            "does not go through transformers' AttentionInterface",
            "does not go through transformers' AttentionInterface",
        ),
    ],
)
def test_refusals(make: Any, attention: str | None, cache: str | None) -> None:
    model = make()
    for refusal, expected in ((model_attention_refusal(model), attention), (cache_refusal(model), cache)):
        assert (refusal is None) if expected is None else (expected in str(refusal))


def test_a_softcap_that_stock_leaves_out() -> None:
    """As Gemma-2 is loaded by older transformers; newer ones choose eager, which is set here by the way out."""
    model = build("gemma2")
    model.config._attn_implementation = "sdpa"
    reason = "Gemma2Attention has a softcap that sdpa leaves out; model.set_attn_implementation('eager') keeps it"
    assert model_attention_refusal(model) == reason
    assert hf_accel.plan(model).stock_attention == reason
    model.set_attn_implementation("eager")
    assert model_attention_refusal(model) is None


def test_no_cache_without_keys_and_values() -> None:
    model = XLNetLMHeadModel(XLNetConfig(vocab_size=50, d_model=32, n_head=2, n_layer=2, d_inner=32))
    assert cache_refusal(model) is not None


def test_attention_sites() -> None:
    sites = attention_sites(build("gemma2"), quantized_kv=True)
    assert [site.name for site in sites] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    spec = sites[0].spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim) == (4, 2, 8, 8)
    assert (spec.window, sites[1].spec.window, spec.softcap, spec.quantized_kv) == (WINDOW, None, 2.0, True)
    assert attention_sites(build("gpt2"), quantized_kv=False)[1].spec.num_kv_heads == 4
    assert [site.name for site in attention_sites(BertLMHeadModel(BertConfig(**TINY, is_decoder=True)),
            quantized_kv=False)] == ["bert.encoder.layer.0.attention.self"]  # fmt: skip


@pytest.mark.parametrize("inner", [64, 80])
def test_what_is_proposed_for_a_group_size_works(inner: int) -> None:
    """32 divides the 32 inputs of most and the 64 of down_proj; nothing divides 80. What is proposed is tried."""
    config = copy.deepcopy(build("llama").config)
    config.intermediate_size = inner
    model = type(build("llama"))(config)
    refused = {"bits": 4, "group_size": 64 if inner == 64 else 32}
    with pytest.raises(UnsupportedError, match="does not divide the") as error:
        hf_accel.plan(model, weights=refused)
    ways = re.findall(r"weights=(\{.*?\})", str(error.value))
    assert len(ways) == 2
    for way in ways:
        assert hf_accel.plan(model, weights=ast.literal_eval(way)).quantized
        assert hf_accel.estimate(model, context=4, bandwidth=1e9, weights=ast.literal_eval(way)).weights_bytes


def test_a_linear_whose_scales_would_not_be_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers renames on saving; what does not come back under its own name stays as it is."""
    model = build("llama")
    assert not any(lost_on_saving(model)(name) for name in ("model.layers.0.mlp.up_proj", "lm_head"))
    renaming = WeightRenaming(source_patterns="up_proj", target_patterns="gate_proj")
    monkeypatch.setattr("hf_accel.linear.hf.get_model_conversion_mapping", lambda *_, **__: [renaming])
    kept = {site.name: site.skip for site in linear_sites(model, ()) if site.skip is not None}
    assert kept.keys() == {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"}
    assert all("it would not be found again" in str(reason) for reason in kept.values())


def test_nothing_is_quantized_whose_tensors_would_get_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    renaming = WeightRenaming(source_patterns="weight_packed", target_patterns="weight_p")
    monkeypatch.setattr("hf_accel.linear.hf.get_model_conversion_mapping", lambda *_, **__: [renaming])
    assert all(site.skip is not None for site in linear_sites(build("llama"), ()))
