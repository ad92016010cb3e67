"""Layers whose own code computes each sequence (Doge, ZAYA, Inkling and others) run as others do, over pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

if not hasattr(transformers, "MistralLarge4Config"):
    pytest.skip("this transformers has not all of these models", allow_module_level=True)

from transformers import (
    DogeConfig,
    DogeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    InklingForCausalLM,
    InklingTextConfig,
    MistralLarge4Config,
    MistralLarge4ForConditionalGeneration,
    Qwen4ExpForCausalLM,
    Qwen4ExpTextConfig,
    ZayaConfig,
    ZayaForCausalLM,
)
from transformers.models.doge.modeling_doge import DogeAttention

import hf_accel
from hf_accel import PagedCache, UnsupportedError
from hf_accel.cache.hf.cache_argument import CACHE_NAME
from hf_accel.kernels.cpu import refusal
from hf_accel.patching.sequence_survey import own_code

from ..selection import some_long
from .families import VOCABULARY
from .snapshot import snapshot
from .together import (
    PROMPTS,
    alone,
    check_forks,
    check_preemption,
    check_programme,
    check_weights_of_attention,
)

pytestmark = pytest.mark.skipif(refusal() is not None, reason=f"states in pages need the kernels: {refusal()}")

USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.25,
}  # fmt: skip
SLIDES, ALL = "hybrid_sliding", "hybrid"


def doge(**settings: Any) -> Any:
    model = DogeForCausalLM(DogeConfig(**USUAL, intermediate_size=48, num_hidden_layers=2, **settings))
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.A)
    return model


def zaya(**settings: Any) -> Any:
    own = {"moe_intermediate_size": 16, "num_experts": 4, "router_hidden_size": 16, "head_dim": 8}
    return ZayaForCausalLM(ZayaConfig(**USUAL, **own, num_hidden_layers=2, **settings))


def inkling(**settings: Any) -> Any:
    own = {
        "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "d_rel": 4,
        "rel_extent": 12, "sliding_window_size": 6, "layer_types": [SLIDES, ALL], "dense_mlp_idx": 1,
        "logits_mup_width_multiplier": 1.0, "route_scale": 1.0,
    }  # fmt: skip
    return InklingForCausalLM(InklingTextConfig(**USUAL, **own, num_hidden_layers=2, **settings))


def qwen(**settings: Any) -> Any:
    """A model with indexers, the gated delta rule, and n-grams of token ids in front of its first layer."""
    own = {
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1],
        "ple_embed_dim": 32, "heads_per_ngram": 2, "ngram_vocab_size_base": 200, "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 8, "indexer_compress_ratio": 2, "layer_types": ["linear_attention", "indexed_attention"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip
    usual = USUAL | {"eos_token_id": VOCABULARY - 1}
    model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**usual, **own, num_hidden_layers=2, **settings))
    model.generation_config.eos_token_id = None
    nn.init.normal_(model.model.layers[0].ple.conv1d.weight, std=0.3)
    return model


def large4(**settings: Any) -> Any:
    """A model whose layers share compressed keys, and what they select: as another one, or apart."""
    text = USUAL | {
        "num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "index_topk": 8, "index_head_dim": 8, "index_n_heads": 16, "num_hidden_layers": 5,
        "kv_source_layers": [0, 1, 1, 3, 0], "indexer_types": ["full", "full", "shared", "full", "full"],
        "no_rope_layers": [1, 0, 0, 1, 1], "model_type": "mistral_large4_text",
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "head_dim": 8,
    }  # fmt: skip
    config = MistralLarge4Config(text_config=text | settings, vision_config=vision, image_token_index=VOCABULARY - 1)
    return MistralLarge4ForConditionalGeneration(config)


KINDS: dict[str, Callable[[], Any]] = {
    "doge": lambda: doge(keep_window_size=12),
    "zaya": lambda: zaya(layer_types=[SLIDES, ALL], sliding_window=5),
    "inkling": lambda: inkling(log_scaling_n_floor=30),
    "qwen": qwen,
    "large4": large4,
}
SELECTS_EQUAL = ("doge",)  # in a prompt, transformers chooses among tokens with equal scores by its length
COUNT = 8


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    return KINDS[kind]().eval()


@pytest.mark.parametrize("kind", some_long(KINDS, "qwen"))
def test_requests_together_give_the_tokens_of_each_alone(kind: str) -> None:
    """Alone, together with others, in padded rows, and over a cache that goes back and is copied."""
    model, prompts = model_of(kind), [PROMPTS[0][:13], PROMPTS[1][:4], PROMPTS[2][:9]]
    expected = [alone(model, prompt, COUNT) for prompt in prompts]
    hf_accel.patch(model, weights=None)
    assert alone(model, prompts[0], COUNT) == expected[0]
    assert hf_accel.stats(model)["loop"] == "ragged"
    found = model.generate_batch(prompts, max_new_tokens=COUNT, do_sample=False)
    assert [output.generated_tokens for output in found.values()] == expected
    ids = torch.tensor([[0] * (13 - len(prompt)) + prompt for prompt in prompts])
    rows = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=COUNT, do_sample=False)
    assert rows[:, 13:].tolist() == expected
    assert hf_accel.stats(model)["loop"] == "ragged"
    if kind not in SELECTS_EQUAL:
        check_forks(model)


@pytest.mark.long  # test_programmes plays one
@pytest.mark.parametrize(("kind", "seed"), [("zaya", 1), ("large4", 7)])
def test_random_requests_with_drafts_in_pools_of_a_fixed_size(kind: str, seed: int) -> None:
    check_programme(model_of(kind), random.Random(seed), block_sizes=(4, 16), seed=seed)


def test_preempted_requests_and_shared_prefixes() -> None:
    check_preemption(model_of("inkling"))


def test_beams() -> None:
    model, ids = model_of("inkling"), torch.tensor([PROMPTS[0][:8], PROMPTS[1][:8]])
    settings = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **settings)
    hf_accel.patch(model, weights=None)
    assert torch.equal(model.generate(ids, **settings), expected)
    assert hf_accel.stats(model)["loop"] == "ragged"


def test_weights_of_attention_over_padded_rows() -> None:
    torch.manual_seed(3)
    model = zaya(attn_implementation="eager").eval()
    check_weights_of_attention(model, torch.randint(1, VOCABULARY, (2, 9)))


def test_padded_rows_are_stocks_where_scores_count_columns() -> None:
    model, ids = model_of("inkling"), torch.tensor([[0, 0, 5, 6], [7, 8, 9, 3]])
    given = {"attention_mask": (ids != 0).long(), "do_sample": False}
    expected = [model.generate(ids, max_new_tokens=count, **given) for count in (4, 27)]
    hf_accel.patch(model, weights=None)
    for count, tokens, loop in zip((4, 27), expected, ("ragged", "stock"), strict=True):
        assert torch.equal(model.generate(ids, max_new_tokens=count, **given), tokens)
        assert hf_accel.stats(model)["loop"].startswith(loop)


def test_code_that_looks_at_other_tokens_stays_with_transformers() -> None:
    """It takes the largest of the keys of a pass: a token's result depends on those behind it."""

    class Peeking(DogeAttention):
        def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states + hidden_states.amax(1, keepdim=True), *args, **kwargs)

    model = model_of("doge")
    model.model.layers[1].self_attn.__class__ = Peeking
    expected = alone(model, PROMPTS[0], 5)
    assert not own_code(model)
    hf_accel.patch(model, weights=None)
    assert alone(model, PROMPTS[0], 5) == expected
    assert hf_accel.stats(model)["loop"].startswith("stock")


def test_code_that_reads_more_of_its_cache_stays_with_transformers() -> None:
    class Reading(DogeAttention):
        def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            assert kwargs[CACHE_NAME] is None or kwargs[CACHE_NAME].is_sliding
            return super().forward(hidden_states, *args, **kwargs)

    model = model_of("doge")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Reading
    assert not own_code(model)


def test_a_cache_without_a_patch_says_what_to_do() -> None:
    model = model_of("qwen")
    with pytest.raises(UnsupportedError, match=r"call hf_accel\.patch\(model\) first"):
        model(torch.tensor([PROMPTS[0]]), past_key_values=PagedCache(model.config))


def test_everything_comes_back() -> None:
    model = model_of("inkling")
    before = snapshot(model)
    hf_accel.patch(model, weights=None)
    alone(model, PROMPTS[0], 3)
    hf_accel.unpatch(model)
    assert snapshot(model) == before


def granite(**settings: Any) -> Any:
    """A model whose scans have a bias in front of them, so that no forward of ours knows them."""
    own = {
        "intermediate_size": 48, "shared_intermediate_size": 48, "num_local_experts": 0, "num_experts_per_tok": 0,
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_proj_bias": True, "mamba_chunk_size": 4, "mamba_expand": 2,
    }  # fmt: skip
    model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**USUAL, **own, num_hidden_layers=2, **settings))
    nn.init.normal_(model.model.layers[0].mamba.in_proj.bias)
    return model.eval()


def logits_of(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    given = {"attention_mask": (ids != 0).long(), "max_new_tokens": 4, "do_sample": False}
    found: list[torch.Tensor] = model.generate(ids, **given, return_dict_in_generate=True, output_logits=True).logits
    return found


def test_padded_rows_are_stocks_where_a_bias_makes_tokens_of_padding() -> None:
    torch.manual_seed(3)
    model, ids = granite(), torch.tensor([[0, 0, 5, 6, 9], [7, 8, 9, 3, 4]])
    expected, alone_expected = logits_of(model, ids), logits_of(model, ids[1:])
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=0, atol=1e-4)
    assert hf_accel.stats(model)["loop"] == "stock: its recurrent layers compute padding as they compute tokens"
    torch.testing.assert_close(logits_of(model, ids[1:]), alone_expected, rtol=0, atol=1e-4)
    assert hf_accel.stats(model)["loop"] == "ragged"
    with pytest.raises(UnsupportedError, match="computes padding"):
        model(ids, attention_mask=(ids != 0).long(), past_key_values=PagedCache(model.config))


@pytest.mark.parametrize("limits", [(0.01, 0.1), (1e-4, float("inf"))])
def test_code_whose_steps_have_limits_in_prompts_alone_stays_with_transformers(limits: tuple[float, float]) -> None:
    """Over pages tokens of a prompt may be computed one by one, as in stock's loop, which this rotation asks for."""
    torch.manual_seed(3)
    rotation = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    usual = granite(rope_parameters=rotation, position_embedding_type="rope")
    model = granite(rope_parameters=rotation, position_embedding_type="rope", time_step_limit=limits)
    ids = torch.tensor([[7, 8, 9, 3, 4]])
    assert own_code(usual) and not own_code(model)
    with torch.no_grad():
        model.model.layers[0].mamba.dt_bias.fill_(-12.0 if limits[0] < 0.01 else 1.0)
        model.model.layers[0].mamba.in_proj.weight[-8:] *= 0.1
    expected = logits_of(model, ids)
    hf_accel.patch(model, weights=None)
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=0, atol=1e-4)
