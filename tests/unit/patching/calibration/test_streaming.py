"""A pass of calibration data quantizes each Linear by what it sees then, and leaves the model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.config import WeightConfig
from hf_accel.linear import QuantExperts, QuantLinear
from hf_accel.linear import quantize as nearest
from hf_accel.linear.input_statistics import Statistics
from hf_accel.linear.methods import gptq

from ....parity.families import build, prompts
from ....parity.snapshot import snapshot

FAMILIES = ["llama", "qwen2", "gemma2", "gpt2"]
IDS = prompts(8, 40)


def config(method: str = "gptq", **settings: Any) -> WeightConfig:
    return WeightConfig(**{"bits": 4, "group_size": 32, "method": method, "calibration": IDS, **settings})


def layers(model: PreTrainedModel) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("family", FAMILIES)
def test_patched_and_taken_back(family: str, method: str) -> None:
    model = build(family)
    before, nearest = snapshot(model), hf_accel.plan(model, weights=config()).quantized
    hf_accel.patch(model, weights=config(method))
    found = layers(model)
    assert found.keys() == {linear.site.name for linear in nearest}
    assert snapshot(hf_accel.unpatch(model)) == before


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_sees_what_quantized_layers_put_out(family: str) -> None:
    """By hand: one Linear after the other is replaced by its quantized weight, and the data goes through again."""
    model = build(family, dtype=torch.float32)
    patched = hf_accel.patch(build(family), weights=config(head=None))
    order = called(model)
    for name in order:
        seen: list[torch.Tensor] = []
        module = model.get_submodule(name)
        hook = module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        model(IDS)
        hook.remove()
        weight = module.weight.t() if type(module).__name__ == "Conv1D" else module.weight
        expected = gptq.quantize(weight, Statistics.of(seen[0]), config())
        quantized = patched.get_submodule(name).quantized
        same = (expected.integers() == quantized.integers()).double().mean()
        assert same > 0.97, name
        weight.copy_(quantized.dequantize(torch.float32))


def called(model: PreTrainedModel) -> list[str]:
    """The Linears in the order of their calls, but for the head."""
    order: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, __, name=name: order.append(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    model(IDS[:1])
    for hook in hooks:
        hook.remove()
    return [name for name in order if name != "lm_head"]


def test_the_plan_and_the_saved_config_say_the_method_and_hold_no_data(tmp_path: Path) -> None:
    model = build("llama")
    plan = hf_accel.plan(model, weights=config())
    assert "int4 group 32 gptq by" in str(plan)
    hf_accel.patch(model, weights=config())
    expected = model(IDS).logits
    kept = model._hf_accel.config.weights
    assert (kept.method, kept.calibration, kept.resume) == ("gptq", None, None)
    settings = model.config.quantization_config.to_dict()
    assert settings["weights"]["method"] == "gptq"
    assert not {"calibration", "resume"} & settings["weights"].keys()
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, expected)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_from_pretrained_gives_what_patch_gives(method: str, tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path)
    settings = hf_accel.AccelConfig(weights=config(method))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    patched = hf_accel.patch(AutoModelForCausalLM.from_pretrained(tmp_path), weights=config(method))
    assert torch.equal(loaded(IDS).logits, patched(IDS).logits)
    assert not hf_accel.is_patched(hf_accel.unpatch(loaded))


def test_calibration_is_needed() -> None:
    model = build("llama")
    with pytest.raises(
        hf_accel.UnsupportedError, match=r"method='gptq' needs calibration=: token ids .* method='rtn'"
    ):
        hf_accel.patch(model, weights={"bits": 4, "group_size": 32, "method": "gptq"})
    assert not hf_accel.is_patched(model)


def test_data_that_leads_to_nan_names_the_layer_and_leaves_the_model() -> None:
    model = build("llama")
    model.model.layers[1].input_layernorm.weight.data[3] = torch.nan
    before = snapshot(model)
    with pytest.raises(
        hf_accel.UnsupportedError, match=r"'model.layers.1.self_attn.q_proj' cannot .* NaN or infinity"
    ):
        hf_accel.patch(model, weights=config())
    assert snapshot(model) == before


def test_layers_that_are_not_reached_are_rounded_to_nearest() -> None:
    model = build("llama")
    model.extra = nn.Linear(32, 32)
    with pytest.warns(hf_accel.HfAccelWarning, match="1 linear layers, 'extra' first, are not reached") as found:
        hf_accel.patch(model, weights=config())
    assert {warning.filename for warning in found} == {__file__}
    expected = hf_accel.linear.quantize(
        model._hf_accel.journal.writes[-1].old.weight, WeightConfig(bits=4, group_size=32)
    )
    assert torch.equal(model.extra.quantized.integers(), expected.integers())


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_eight_bits_and_zero_points(method: str) -> None:
    for settings in ({"bits": 8}, {"symmetric": False}):
        model = build("qwen2")
        stock = model(IDS).logits
        got = hf_accel.patch(model, weights=config(method, activations=None, **settings))(IDS).logits
        assert (got - stock).norm() < (0.05 if settings == {"bits": 8} else 0.6) * stock.norm()


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 101}
    model = T5ForConditionalGeneration(T5Config(**sizes)).eval()
    with pytest.raises(hf_accel.UnsupportedError, match="T5ForConditionalGeneration is an encoder-decoder"):
        hf_accel.patch(model, weights=config())


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_of_a_mixture_are_rounded_to_nearest(method: str) -> None:
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "eos_token_id": 1}
    config_of = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    torch.manual_seed(0)
    model = MixtralForCausalLM(config_of).eval()
    before, experts = snapshot(model), [p for name, p in model.named_parameters() if "experts" in name]
    expected = [p.clone() for p in experts]
    hf_accel.patch(model, weights=config(method))
    assert {name.rpartition(".")[2] for name in layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
    assert experts and all(torch.equal(p, e) for p, e in zip(experts, expected, strict=True))
    held = [module for module in model.modules() if isinstance(module, QuantExperts)]
    floats = iter(expected)
    for weights in (weights for module in held for weights in module.weights.values()):
        rounded = nearest(next(floats).flatten(0, 1), WeightConfig(bits=4, group_size=weights.layout.group_size))
        assert torch.equal(weights.quantized.integers(), rounded.integers())
    assert len(held) == 2 and next(floats, None) is None
    assert snapshot(hf_accel.unpatch(model)) == before


def test_the_dtype_that_a_folded_model_was_moved_to_stays() -> None:
    model = hf_accel.patch(build("llama"), weights=config("awq", head=None))
    moved = hf_accel.unpatch(model.to(torch.bfloat16))
    expected = build("llama").to(torch.bfloat16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in moved.state_dict().items())
