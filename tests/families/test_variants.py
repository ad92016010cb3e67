"""What is drawn for other configurations, and what of it is kept; a few of them are compared."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ..selection import some_long
from .features import FAULTS, outcomes
from .models import _config, build, drawn, enliven, family
from .variants import Draws, Group, largest_fitting

FEATURES = ["forward", "steps", "greedy", "generate_batch"]
# Of each kind of state or settings one, by a number that draws what the others do not.
SHORT = [
    ("Qwen3NextForCausalLM", 1),
    ("DeepseekV3ForCausalLM", 3),
    ("NemotronHForCausalLM", 1),
    ("Gemma4ForCausalLM", 2),
]
MANY = ["FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2MoeForCausalLM", "Zamba2ForCausalLM"]
MANY += ["Glm4MoeForCausalLM", "Gemma3nForCausalLM", "Llama4ForCausalLM", "MptForCausalLM"]

# Fields that each kind of model has, of which many numbers draw several values.
REACHED = {
    "Qwen3NextForCausalLM": (
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim",
        "layer_types", "num_experts", "num_experts_per_tok", "norm_topk_prob", "head_dim", "num_key_value_heads",
    ),
    "DeepseekV3ForCausalLM": (
        "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group",
        "n_shared_experts", "first_k_dense_replace", "rope_interleave", "attention_bias", "routed_scaling_factor",
        "hidden_size", "num_attention_heads",
    ),
    "NemotronHForCausalLM": (
        "n_groups", "ssm_state_size", "conv_kernel", "mlp_hidden_act", "mamba_num_heads", "layers_block_type",
        "num_attention_heads", "moe_latent_size", "time_step_min",
    ),
    "RecurrentGemmaForCausalLM": ("block_types",),
    "MambaForCausalLM": ("hidden_size",),
    "BloomForCausalLM": ("n_head", "n_layer", "hidden_size"),
    "BartForConditionalGeneration": ("encoder_layers", "decoder_layers"),
    "Qwen3_5ForCausalLM": ("rope_parameters",),
    "Qwen2VLForConditionalGeneration": ("rope_parameters",),
    "GraniteForCausalLM": ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    "Gemma4ForCausalLM": (
        "attention_k_eq_v", "enable_moe_block", "sliding_window", "rope_parameters", "num_kv_shared_layers",
    ),
    "FalconForCausalLM": ("multi_query", "new_decoder_architecture", "parallel_attn", "alibi"),
    "OPTForCausalLM": ("do_layer_norm_before", "word_embed_proj_dim", "enable_bias"),
    "MptForCausalLM": ("no_bias", "learned_pos_emb"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), REACHED.items(), ids=list(REACHED))
def test_fields_take_several_values(name: str, fields: tuple[str, ...]) -> None:
    found: dict[str, set[str]] = {field: set() for field in fields}
    for number in range(1, 25):
        draws = Draws(number)
        _config_or_none(name, draws)
        for values in draws.values.values():
            for field in values.keys() & set(fields):
                found[field].add(repr(values[field]))
    assert [field for field, values in found.items() if len(values) < 2] == []


def _config_or_none(name: str, draws: Draws) -> Any:
    try:
        return _config(family(name), draws)
    except Exception:  # what was drawn together does not fit
        return None


def test_a_number_draws_the_same_again() -> None:
    one = replace(family("DeepseekV3ForCausalLM"), variant=5)
    first, second = build(one), build(one)
    assert first.config.to_dict() == second.config.to_dict()
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_factors_of_queries_by_position_stay() -> None:
    """Prompts are longer than the positions from which they grow."""
    found = [drawn(replace(family("Ministral3ForCausalLM"), variant=number)) for number in range(1, 5)]
    rotations = [values["Ministral3Config"]["rope_parameters"] for values in found]
    assert {rotation["llama_4_scaling_beta"] for rotation in rotations} <= {0.1, 0.5}
    assert all(rotation["original_max_position_embeddings"] < 13 for rotation in rotations)


def test_what_stock_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama raises for a kind of rotation that is none; all else that was drawn beside it stays."""
    from . import variants

    monkeypatch.setattr(variants, "MOVED", 1.0)
    monkeypatch.setitem(variants.FREE, "hidden_act", ("no activation",))
    one = replace(family("LlamaForCausalLM"), variant=999)
    values = drawn(one)["LlamaConfig"]
    assert "hidden_act" not in values
    assert {"num_attention_heads", "mlp_bias", "attention_bias", "rope_parameters"} <= values.keys()
    assert build(one).config.hidden_act == "silu"


GROUPS: list[Group] = [("Config", letter) for letter in "abcdefg"]


@pytest.mark.parametrize("count", range(len(GROUPS) + 1))
def test_exactly_what_does_not_fit_is_left_out(count: int) -> None:
    for bad in itertools.combinations(GROUPS, count):
        assert largest_fitting(lambda left_out, bad=bad: left_out >= set(bad), GROUPS) == set(bad)


def test_of_two_that_do_not_fit_together_one_stays() -> None:
    for pair in itertools.combinations(GROUPS, 2):
        left_out = largest_fitting(lambda left_out, pair=pair: bool(left_out & set(pair)), GROUPS)
        assert len(left_out) == 1
        assert left_out <= set(pair)


def test_biases_by_which_experts_are_chosen_are_random() -> None:
    model = build(family("DeepseekV3ForCausalLM"))
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(bias.unique().numel() == bias.numel() for bias in biases)


def test_buffers_that_are_not_saved_stay() -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.zeros(3), persistent=False)
    enliven(model)
    assert not model.kept.any()


@pytest.mark.parametrize(
    ("name", "number"),
    some_long([pytest.param(*case) for case in SHORT], "DeepseekV3ForCausalLM", "NemotronHForCausalLM"),
)  # of which tests/parity/test_programmes.py plays requests
def test_a_drawn_configuration_answers_as_stock(name: str, number: int) -> None:
    _answers_as_stock(name, number)


@pytest.mark.long
@pytest.mark.parametrize("number", range(5, 8))
@pytest.mark.parametrize("name", MANY)
def test_drawn_configurations_answer_as_stock(name: str, number: int) -> None:
    """`python -m tests.families.run --all --variants 20` compares every class so, in all features."""
    _answers_as_stock(name, number)


def _answers_as_stock(name: str, number: int) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    one = replace(family(name), variant=number)
    found = dict(outcomes(one, FEATURES))
    assert {feature: result for feature, result in found.items() if result.word in (*FAULTS, "build")} == {}, drawn(
        one
    )
