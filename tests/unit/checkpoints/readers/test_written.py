"""Checkpoints that llm-compressor, AutoAWQ, AutoGPTQ, GPTQModel and llama.cpp wrote; see written/make.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_accel
from hf_accel import HfAccelError
from hf_accel.linear import QuantLinear
from hf_accel.undo.state import state_of

from .written.make import GROUP, HERE, LINEARS, SCHEMES, vectors, weights

IDS = torch.arange(3, 15)[None]
FOLDERS = [
    "auto_awq", "auto_gptq_4_bits", "auto_gptq_4_bits_asymmetric", "auto_gptq_8_bits",
    "gptq_model_4_bits_asymmetric", "gptq_model_4_bits_asymmetric_v2", "gptq_model_8_bits",
    *(f"llm_compressor_{kind}" for kind in SCHEMES),
]  # fmt: skip
UNNAMED = "auto_gptq_4_bits_asymmetric"  # AutoGPTQ does not say in config.json that it wrote it


def named(name: str, folder: Path, **meta: str) -> Path:
    """A copy that says who wrote it."""
    shutil.copytree(HERE / name, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["meta"] = meta
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantized(model: Any) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_numbers_of_the_writers_own_decoder(name: str, tmp_path: Path) -> None:
    folder = named(name, tmp_path / "named", quantizer="auto_gptq:0.7.1") if name == UNNAMED else HERE / name
    model = hf_accel.load(folder)
    products, layers = load_file(HERE / name / "products.safetensors"), quantized(model)
    assert layers.keys() == products.keys() == LINEARS.keys()
    for linear, layer in layers.items():
        weight = layer.quantized.dequantize(torch.float64)
        torch.testing.assert_close((weight @ vectors(weight.shape[1])).float(), products[linear], rtol=1e-4, atol=1e-5)
        assert layer.layout.bits == (4 if "_4_bits" in name or "w4" in name or "awq" in name else 8)
    assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("name", ["gptq_model_4_bits_asymmetric", "gptq_model_4_bits_asymmetric_v2"])
def test_zero_points_of_0_are_there_and_right(name: str) -> None:
    """A group without a negative weight; read as 16 it would be wrong by its whole range."""
    layers = quantized(hf_accel.load(HERE / name))
    for linear, layer in layers.items():
        exact = weights()[f"{linear}.weight"].double()
        near = (layer.quantized.dequantize(torch.float64) - exact)[1::5, :GROUP].abs().amax()
        assert near < exact[1::5, :GROUP].amax() / 15


def test_who_wrote_a_zero_point_of_0_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(HfAccelError, match=r"qzeros' holds 15 .* add \"meta\": {\"quantizer\": \"auto_gptq\"} or"):
        hf_accel.load(HERE / UNNAMED)
    for number, quantizer in enumerate(("auto_gptq", "gptqmodel")):  # both ways out lead somewhere
        hf_accel.load(named(UNNAMED, tmp_path / str(number), quantizer=quantizer))


def test_static_scales_of_activations_are_left_out_and_the_plan_says_so() -> None:
    model = hf_accel.load(HERE / "llm_compressor_fp8_static")
    lines = [line["reason"] for line in state_of(model).description["choices"]]
    assert "the checkpoint's static scales of activations are not used; rows get scales of their own" in lines


@pytest.mark.parametrize("name", ["llama_cpp_q4_k_m", "llama_cpp_q2_k"])
def test_files_of_llama_cpp_as_transformers_reads_them(name: str) -> None:
    pytest.importorskip("gguf")
    layers = quantized(hf_accel.load(HERE / name / "model.gguf"))
    expected = AutoModelForCausalLM.from_pretrained(HERE / name, gguf_file="model.gguf")
    linears = {name for name, module in expected.named_modules() if isinstance(module, torch.nn.Linear)}
    assert layers.keys() == linears
    for linear, layer in layers.items():
        weight = expected.get_submodule(linear).weight
        torch.testing.assert_close(layer.quantized.dequantize(torch.float32), weight.float(), rtol=1e-4, atol=1e-6)
