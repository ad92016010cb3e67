"""Checkpoints of gpt-oss: MXFP4 experts are held and multiplied as they are stored. The oracle is transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

import hf_accel
from hf_accel import HfAccelError
from hf_accel.linear import QuantExperts, QuantLinear
from hf_accel.linear.formats import MXFP4, state
from hf_accel.undo.state import state_of

EXPERTS, HIDDEN, INNER = 4, 64, 96
IDS = torch.tensor([[3, 5, 7, 11, 2, 9, 4, 8]])
NAME = "model.layers.1.mlp.experts"


def blocks(outputs: int, inputs: int) -> dict[str, Tensor]:
    """All codes, and exponents around those of small weights, with the extremes among them."""
    scales = torch.randint(116, 124, (EXPERTS, outputs, inputs // 32), dtype=torch.uint8)
    packed = torch.randint(0, 256, (EXPERTS, outputs, inputs // 32, 16), dtype=torch.uint8)
    return {"blocks": packed, "scales": scales}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A tiny gpt-oss as its files are, not by our own packing."""
    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=2, num_local_experts=EXPERTS, num_experts_per_tok=2, hidden_size=HIDDEN,
        intermediate_size=INNER, vocab_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, sliding_window=16, dtype="bfloat16", eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    path = tmp_path / "stored"
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        for name, shape in (("gate_up_proj", (2 * INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
            del tensors[f"{experts}.{name}"]
            tensors |= {f"{experts}.{name}_{part}": values for part, values in blocks(*shape).items()}
    tensors[f"{NAME}.down_proj_scales"][0, 0, 0], tensors[f"{NAME}.down_proj_scales"][1, 2, 1] = 0, 200
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(settings))
    return path


def change(path: Path, name: str, values: Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name)
    tensors |= {} if values is None else {name: values}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def dequantized(path: Path, dtype: torch.dtype) -> Any:
    return GptOssForCausalLM.from_pretrained(path, quantization_config=Mxfp4Config(dequantize=True), dtype=dtype)


def experts_of(model: Any) -> dict[str, QuantExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantExperts)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_the_numbers_are_those_of_transformers(stored: Path, dtype: torch.dtype) -> None:
    model, float_model = hf_accel.load(stored, dtype=dtype), dequantized(stored, dtype)
    found = experts_of(model)
    assert len(found) == 2
    for name, experts in found.items():
        there = float_model.get_submodule(name)
        for key, weights in experts.weights.items():
            assert weights.layout == MXFP4 and weights.compute_dtype is dtype
            stocks = there._parameters[key].to(dtype)  # older transformers leaves it in bfloat16
            assert torch.equal(weights.dense(dtype).transpose(1, 2), stocks)
            assert torch.equal(experts._parameters[f"{key}_bias"], there._parameters[f"{key}_bias"])


def change_scale(path: Path) -> None:
    """Take the extreme exponents away, beside which all other numbers are nothing."""
    scales = load_file(path / "model.safetensors")[f"{NAME}.down_proj_scales"]
    change(path, f"{NAME}.down_proj_scales", scales.clamp(116, 123))


def test_a_model_computes_in_4_bits_and_is_saved_so(stored: Path, tmp_path: Path) -> None:
    change_scale(stored)
    model, float_model = hf_accel.load(stored, dtype=torch.float32), dequantized(stored, torch.float32)
    for experts in experts_of(model).values():
        assert {w.chosen.backend.name for w in experts.weights.values()} <= {"cpu", "reference"}
    with torch.no_grad():
        ours, theirs = model(IDS).logits, float_model(IDS).logits
    assert (ours - theirs).norm() < 0.02 * theirs.norm(), "activations of 8 bits"
    model.save_pretrained(tmp_path / "saved")
    again = GptOssForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for one, other in zip(experts_of(model).values(), experts_of(again).values(), strict=True):
        for key, weights in one.weights.items():
            stored_form, same = state(weights.quantized), state(other.weights[key].quantized)
            assert stored_form.keys() == same.keys()
            assert all(torch.equal(tensor, same[name]) for name, tensor in stored_form.items())
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, ours)


def test_the_rest_takes_the_weights_that_were_asked_for(stored: Path, tmp_path: Path) -> None:
    change_scale(stored)
    model = hf_accel.load(stored, weights="int8", dtype=torch.float32)
    plain = hf_accel.load(stored, dtype=torch.float32)
    attention = model.model.layers[0].self_attn.q_proj
    assert isinstance(attention, QuantLinear) and attention.layout.label == "int8"
    assert not isinstance(plain.model.layers[0].self_attn.q_proj, QuantLinear)
    assert {w.layout for experts in experts_of(model).values() for w in experts.weights.values()} == {MXFP4}
    assert not any(name.endswith("router") for name, m in model.named_modules() if isinstance(m, QuantLinear))
    model.save_pretrained(tmp_path / "saved")
    again = GptOssForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = model(IDS).logits, plain(IDS).logits
        assert torch.equal(again(IDS).logits, ours)
    assert 0 < (ours - theirs).norm() < 0.05 * theirs.norm()


def test_the_plan_and_the_estimate_count_what_is_there(stored: Path) -> None:
    model = hf_accel.load(stored)
    line, rest = (line for line in state_of(model).description["choices"] if line["topic"] == "weights")
    assert (line["what"], line["reason"]) == ("4 weights of experts", "as stored")
    assert re.fullmatch(r"mxfp4 group 32 by \w+", line["choice"]) and rest["choice"] == "as they are"
    numbers = 2 * EXPERTS * 3 * INNER * HIDDEN  # in both layers
    found = hf_accel.estimate(model, context=64, bandwidth=1e9, compute=1e9)
    assert found.weights == "mxfp4"
    biases = 2 * EXPERTS * (2 * INNER + HIDDEN) * 2  # bfloat16
    assert found.weights_by_kind["experts"] == numbers // 2 + biases
    assert found.weights_by_kind["scales"] == numbers // 32
    as_bytes = hf_accel.estimate(model, context=64, weights="int8", bandwidth=1e9, compute=1e9)
    assert as_bytes.weights == "int8" and as_bytes.weights_by_kind["experts"] == numbers + biases
    assert hf_accel.estimate(model, context=64).weights == "mxfp4", "measured by its own products"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (None, "has no 'model.layers.1.mlp.experts.quantized_down.blocks'"),
        (torch.zeros(EXPERTS, HIDDEN, 2, 16, dtype=torch.uint8), "is [4, 64, 2, 16] in the checkpoint"),
        (torch.zeros(EXPERTS, HIDDEN, 3, 16, dtype=torch.int8), "is torch.int8 in the checkpoint"),
    ],
)
def test_damaged_files_are_refused(stored: Path, part: Tensor | None, message: str) -> None:
    change(stored, f"{NAME}.down_proj_blocks", part)
    with pytest.raises(HfAccelError, match=re.escape(message)):
        hf_accel.load(stored)


def test_an_exponent_that_is_no_number_is_refused(stored: Path) -> None:
    scales = load_file(stored / "model.safetensors")[f"{NAME}.down_proj_scales"]
    scales[2, 5, 1] = 255
    change(stored, f"{NAME}.down_proj_scales", scales)
    with pytest.raises(HfAccelError, match=re.escape(f"holds NaN at [{2 * HIDDEN + 5}, 1]")):
        hf_accel.load(stored)


def test_a_config_that_says_otherwise_is_refused(stored: Path, tmp_path: Path) -> None:
    hf_accel.load(stored).save_pretrained(tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    settings["quantization_config"]["modules"][f"{NAME}.quantized_down"]["group_size"] = 64
    (tmp_path / "saved" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(hf_accel.UnsupportedError, match=r"must be .*'group_size': 32"):
        GptOssForCausalLM.from_pretrained(tmp_path / "saved")


def test_asking_for_it_names_the_way_out() -> None:
    with pytest.raises(hf_accel.UnsupportedError, match=re.escape("hf_accel.load(path) for a checkpoint of it")):
        hf_accel.AccelConfig("mxfp4")
