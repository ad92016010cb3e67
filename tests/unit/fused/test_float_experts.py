"""Mixtures with float weights, patched: experts and routers are native calls, which a layer calls behind its own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig

import hf_accel
from hf_accel.fused.float_experts import ExpertsState, NativeExperts
from hf_accel.fused.layer_programme import LayerProgramme
from hf_accel.fused.routers import NativeRouter
from hf_accel.undo.journal import original_class
from hf_accel.undo.state import FUSED

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=40, num_experts=7, num_experts_per_tok=3),
    "gpt_oss": GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip
if "granitemoe_swa" in CONFIG_MAPPING:  # with sinks, and a rotation that has a native call
    CONFIGS["granitemoe_swa"] = CONFIG_MAPPING["granitemoe_swa"](
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    )
IDS = torch.randint(1, 96, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_fill_(1, torch.tensor([0, 1]), 0) | torch.tensor([[1], [0], [1]])
LENGTH = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}


def make(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=dtype).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3 if parameter.dim() > 1 else 0.5)
    return model


def programmes(model):
    return [vars(layer)[FUSED].programme for layer in model.model.layers]


def modules_of(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_stock_and_layers_are_native_up_to_their_experts(name):
    model = make(name)
    expected = model.generate(IDS, attention_mask=MASK, **LENGTH)
    logits = model(IDS, attention_mask=MASK).logits[MASK.bool()]
    hf_accel.patch(model, weights=None)
    assert len(modules_of(model, NativeExperts)) == len(modules_of(model, NativeRouter)) == 2
    assert torch.equal(model.generate(IDS, attention_mask=MASK, **LENGTH), expected)
    for programme in programmes(model):
        assert isinstance(programme, LayerProgramme) and len(programme.called) == 1
    with torch.no_grad():
        torch.testing.assert_close(model(IDS, attention_mask=MASK).logits[MASK.bool()], logits, atol=2e-4, rtol=2e-4)
    hf_accel.unpatch(model)
    assert not modules_of(model, NativeExperts | NativeRouter)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])  # others attend within windows
def test_tokens_of_bfloat16_do_not_depend_on_the_batch(name):
    model = hf_accel.patch(make(name, torch.bfloat16), weights=None, deterministic=True)
    together = model.generate(IDS, attention_mask=MASK, **LENGTH)
    for row in range(len(IDS)):
        kept = MASK[row].bool()
        alone = model.generate(IDS[row][kept][None], **LENGTH)
        assert torch.equal(alone[0, -9:], together[row, -9:])


def test_hooks_within_a_mixture_are_called():
    model = hf_accel.patch(make("qwen3_moe"), weights=None)
    expected, seen = model.generate(IDS[:1], **LENGTH), []
    block = model.model.layers[1].mlp
    for part in (block, block.experts, block.gate, block.experts.act_fn):
        part.register_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    assert torch.equal(model.generate(IDS[:1], **LENGTH), expected)
    assert len(set(seen)) == 4


@torch.no_grad()
def test_another_activation_is_noticed():
    model = make("mixtral")
    hf_accel.patch(model, weights=None)
    experts = model.model.layers[0].mlp.experts
    given = torch.randn(4, 64), torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    native = experts(*given)
    for activation in (nn.GELU(), nn.Tanh()):  # the second has no native call
        experts.act_fn = activation
        expected = original_class(experts).forward(experts, *given)
        assert not torch.equal(expected, native)
        torch.testing.assert_close(experts(*given), expected)


@torch.no_grad()
def test_other_weights_are_noticed():
    model = hf_accel.patch(make("mixtral"), weights=None)
    experts = model.model.layers[0].mlp.experts
    given = torch.randn(4, 64), torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    native = experts(*given)
    experts.down_proj = nn.Parameter(experts.down_proj * 2)
    torch.testing.assert_close(experts(*given), native * 2)
    experts.down_proj.data = experts.down_proj.data / 2
    torch.testing.assert_close(experts(*given), native)


def test_experts_set_to_code_of_others_stay_as_they_are():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    calls = []
    ALL_EXPERTS_FUNCTIONS.register("mine", lambda self, x, index, weights: calls.append(1) or torch.zeros_like(x))
    model = hf_accel.patch(make("mixtral"), weights=None)
    model.generate(IDS[:1], **LENGTH)
    model.config._experts_implementation = "mine"
    for layer in model.model.layers:
        layer.mlp.experts.config._experts_implementation = "mine"
    model.generate(IDS[:1], **LENGTH)
    assert len(calls) >= 2 * 9


def test_copies_start_without_addresses():
    model = hf_accel.patch(make("qwen3_moe"), weights=None)
    expected = model.generate(IDS[:1], **LENGTH)
    assert torch.equal(copy.deepcopy(model).generate(IDS[:1], **LENGTH), expected)
    assert pickle.loads(pickle.dumps(ExpertsState(5))).rows == 5
