"""weights="fp8" in a whole model: the reference on a CPU, saved and loaded, taken out, trained over."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_accel
from hf_accel.errors import UnsupportedError
from hf_accel.linear import Float8Weight, QuantLinear

from ...parity.dequantize import dequantized
from ...parity.families import build, inputs
from ...parity.snapshot import bits, logits, snapshot

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "stdlib-tiny"
SLOW = "no kernel multiplies by FP8 here: each call dequantizes the weight first, slower than stock"


def generate(model: Any, **keywords: Any) -> Tensor:
    tokens: Tensor = model.generate(**inputs("left"), max_new_tokens=8, do_sample=False, **keywords)
    return tokens


def layers(model: Any) -> dict[str, QuantLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear) and m.layout.label == "fp8"}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_computes_with_the_dequantized_numbers_and_comes_back(family: str) -> None:
    stock = build(family)
    model = copy.deepcopy(stock)
    before = snapshot(model)
    lines = hf_accel.plan(model, weights="fp8").to_dict()["choices"]
    assert any(line["choice"] == "fp8 by reference" and SLOW in line["reason"] for line in lines)
    hf_accel.patch(model, weights={"format": "fp8", "head": None, "activations": None})
    assert len(layers(model)) >= 2 * 4
    assert all(isinstance(layer.quantized, Float8Weight) for layer in layers(model).values())
    expected = dequantized(stock, model)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-4)
    assert torch.equal(generate(model), generate(expected))
    assert torch.equal(generate(model, prompt_lookup_num_tokens=3), generate(expected))
    assert hf_accel.verify(model, [[5, 6, 7]], max_new_tokens=4)
    hf_accel.unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_saved_and_loaded_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = hf_accel.patch(build("llama").to(dtype), weights={"format": "fp8", "activations": "fp8"})
    model.save_pretrained(tmp_path)
    for other in (AutoModelForCausalLM.from_pretrained(tmp_path), copy.deepcopy(model)):
        assert layers(other).keys() == layers(model).keys()
        assert all(layer.activations == "fp8" for layer in layers(other).values())
        for (name, one), (key, two) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
            assert name == key and one.dtype is two.dtype and bits(one) == bits(two)
        if dtype is torch.float32:  # in another one, `.to()` rounded the tables of the first model's rotation too
            assert bits(logits(other)) == bits(logits(model))
    assert model.lm_head.layout.label == "int8"


def test_loaded_as_it_is_read(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    config = hf_accel.AccelConfig(weights="fp8")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert bits(logits(loaded)) == bits(logits(hf_accel.patch(build("llama"), weights="fp8")))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    hf_accel.patch(build("llama"), weights="fp8").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert tensors[name].dtype is torch.float8_e4m3fn
    save_file(tensors | {name: tensors[name].float()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(hf_accel.HfAccelError, match=r"must be torch\.float8_e4m3fn with bits=8, format='fp8'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    tensors[name].view(torch.uint8)[2, 7] = 0xFF
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(hf_accel.HfAccelError, match=r"q_proj\.weight' holds NaN at \[2, 7\] in the checkpoint; save"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_goes_with_fp8() -> None:
    for weights, words in (
        ({"format": "fp8", "bits": 4}, "with format='fp8', bits=4 is not known; use 8"),
        (
            {"format": "fp8", "activations": "int8"},
            "activations='int8' is not known; choose one of 'auto', None, 'fp8'",
        ),
        ({"activations": "fp8"}, "activations='fp8' is for FP8 weights; choose weights='fp8'"),
        ({"format": "fp8", "method": "gptq", "calibration": ["text"]}, "method='gptq' is not known; use 'rtn'"),
        ({"format": "fp8", "average_bits": 4.5, "calibration": ["text"]}, "average_bits=4.5 is not known; use None"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            hf_accel.plan(build("llama"), weights=weights)
        assert words in str(caught.value)


def test_bytes_are_estimated_and_measured_alike() -> None:
    model = build("llama")
    expected = hf_accel.estimate(model, context=16, batch=1, weights="fp8")
    int8 = hf_accel.estimate(model, context=16, batch=1, weights="int8")
    assert expected.weights == "fp8" and expected.weights_bytes == int8.weights_bytes
    patched = hf_accel.patch(model, weights="fp8")
    assert sum(layer.spec.weight_bytes for layer in layers(patched).values()) == sum(
        layer.quantized.weight.nbytes + layer.quantized.weight_scale.nbytes for layer in layers(patched).values()
    )


@pytest.mark.parametrize("activations", [None, "fp8"])
def test_adapters_train_over_it(activations: Any) -> None:
    peft = pytest.importorskip("peft")
    model = hf_accel.patch(build("llama"), weights={"format": "fp8", "activations": activations, "head": None})
    before = {name: bits(layer.quantized.weight.view(torch.uint8)) for name, layer in layers(model).items()}
    trained = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    ids = torch.tensor([[5, 6, 7, 8]])
    trained(input_ids=ids, labels=ids).loss.backward()
    gradients = [p.grad for p in trained.parameters() if p.requires_grad]
    assert gradients and all(g is not None and g.isfinite().all() and g.any() for g in gradients)
    merged = trained.merge_and_unload()
    after = {name: bits(layer.quantized.weight.view(torch.uint8)) for name, layer in layers(merged).items()}
    changed = {name.rpartition(".")[2] for name in before if before[name] != after[name]}
    assert changed == {"q_proj", "v_proj"}


def test_perplexity_of_the_small_model() -> None:
    """Less than INT4 loses, and little: three bits after the first of each number are kept."""
    model = AutoModelForCausalLM.from_pretrained(TINY)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    text = (TINY / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text)["input_ids"][:2048]).view(-1, 256)
    found = {}
    for weights in ("fp8", {"format": "fp8", "activations": "fp8"}, "int4"):
        with hf_accel.patched(model, weights=weights, keep_original=True):
            found[str(weights)] = hf_accel.quantization_report(model, ids)
    fp8, rounded, int4 = found.values()
    assert abs(fp8.change_percent) < 0.5 and abs(rounded.change_percent) < 1
    assert fp8.kl < rounded.kl < int4.kl
