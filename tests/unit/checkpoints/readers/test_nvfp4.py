"""NVFP4A16 checkpoints, written by compressed-tensors itself, which is the oracle of their numbers too."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_accel
from hf_accel import HfAccelError, UnsupportedError
from hf_accel.linear import QuantLinear
from hf_accel.linear.formats import NVFP4, state

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

FORMAT = "nvfp4-pack-quantized"
IDS = torch.tensor([[3, 5, 7, 11, 2, 9, 4, 8]])
Q = "model.layers.0.self_attn.q_proj"


def scales_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of groups and the number that divides them, as NVIDIA defines them: the largest group gets 448."""
    largest = weight.unflatten(1, (-1, 16)).abs().amax(-1)
    whole = (448.0 * 6.0 / largest.max()).reshape(1)
    return (largest / 6.0 * whole).to(torch.float8_e4m3fn), whole


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A tiny Llama that compressed-tensors has compressed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, eos_token_id=None, pad_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    model, path = LlamaForCausalLM(config).to(torch.bfloat16), tmp_path / "stored"
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(FORMAT)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = tensors.pop(f"{name}.weight").float()
            scale, whole = scales_of(weight)
            parts = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": whole}
            made = compressor.compress(parts, scheme)
            tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in made.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((path / "config.json").read_text())
    quantized = QuantizationConfig(
        config_groups={"group_0": scheme}, format=FORMAT, ignore=["lm_head"], quantization_status="compressed"
    )
    settings["quantization_config"] = json.loads(quantized.model_dump_json()) | {"quant_method": "compressed-tensors"}
    (path / "config.json").write_text(json.dumps(settings))
    return path


def layers_of(model: Any) -> dict[str, QuantLinear]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    return {name: layer for name, layer in found.items() if layer.layout.format == "nvfp4"}


def decompressed(path: Path, name: str) -> Tensor:
    """The weight by compressed-tensors, which multiplies in float32 and rounds to bfloat16."""
    tensors = load_file(path / "model.safetensors")
    parts = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    weight: Tensor = BaseCompressor.get_value_from_registry(FORMAT).decompress(parts, scheme)["weight"]
    return weight


def same_state(one: QuantLinear, other: QuantLinear) -> bool:
    ours, theirs = state(one.quantized), state(other.quantized)
    equal = (torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)) for name, tensor in ours.items())
    return ours.keys() == theirs.keys() and all(equal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_numbers_are_those_of_compressed_tensors(stored: Path, dtype: torch.dtype) -> None:
    layers = layers_of(hf_accel.load(stored, dtype=dtype))
    assert len(layers) == 14
    for name, layer in layers.items():
        assert layer.layout == NVFP4 and layer.dtype is dtype
        assert layer.chosen.backend.name in ("cpu", "triton", "reference")
        dense, theirs = layer.quantized.dequantize(torch.bfloat16), decompressed(stored, name)
        assert theirs.dtype is torch.bfloat16 and torch.equal(dense, theirs)


def test_a_model_computes_in_4_bits_and_is_saved_so(stored: Path, tmp_path: Path) -> None:
    model = hf_accel.load(stored, dtype=torch.float32)
    stock = LlamaForCausalLM(model.config).eval()
    tensors = {n: t for n, t in load_file(stored / "model.safetensors").items() if n in stock.state_dict()}
    dense = {f"{name}.weight": layer.quantized.dequantize(torch.float32) for name, layer in layers_of(model).items()}
    stock.load_state_dict(tensors | dense)
    with torch.no_grad():
        ours, theirs = model(IDS).logits, stock(IDS).logits
    assert (ours - theirs).norm() < 0.02 * theirs.norm(), "activations of 8 bits"
    model.save_pretrained(tmp_path / "saved")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert all(same_state(layer, layers_of(again)[name]) for name, layer in layers_of(model).items())
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, ours)


def test_the_scale_of_the_whole_weight_keeps_its_dtype(stored: Path) -> None:
    model = hf_accel.load(stored, dtype=torch.float32)
    layer = layers_of(model)[Q]
    before = {name: tensor.clone() for name, tensor in state(layer.quantized).items()}
    layer.to(torch.bfloat16)
    copied = pickle.loads(pickle.dumps(layer))
    for made in (layer, copied):
        assert made.dtype is torch.bfloat16
        for name, tensor in state(made.quantized).items():
            assert tensor.dtype is before[name].dtype
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))


def test_a_weight_can_be_written(stored: Path) -> None:
    layer = layers_of(hf_accel.load(stored, dtype=torch.float32))[Q]
    value = layer.quantized.dequantize(torch.float32) * 3 + 0.01
    layer.write(value)
    assert layer.layout == NVFP4
    assert (layer.quantized.dequantize(torch.float32) - value).norm() < 0.15 * value.norm()


def changed(path: Path, name: str, values: Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name)
    tensors |= {} if values is None else {name: values}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("weight_global_scale", None, f"has no '{Q}.weight_global_scale'"),
        ("weight_global_scale", torch.zeros(1), "is 0.0 in the checkpoint, by which scales cannot be divided"),
        ("weight_global_scale", torch.ones(2), "is [2] in the checkpoint, but must be [1]"),
        ("weight_scale", torch.ones(64, 4), "is torch.float32 in the checkpoint"),
        ("weight_packed", torch.zeros(64, 64, dtype=torch.uint8), "must be [64, 32]"),
    ],
)
def test_damaged_files_are_refused(stored: Path, part: str, values: Tensor | None, message: str) -> None:
    changed(stored, f"{Q}.{part}", values)
    with pytest.raises(HfAccelError, match=re.escape(message)):
        hf_accel.load(stored)


def test_a_scale_that_is_no_number_is_refused(stored: Path) -> None:
    scales = load_file(stored / "model.safetensors")[f"{Q}.weight_scale"]
    scales.view(torch.uint8)[5, 1] = 0x7F
    changed(stored, f"{Q}.weight_scale", scales)
    with pytest.raises(HfAccelError, match=re.escape("holds NaN at [5, 1]")):
        hf_accel.load(stored)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("input_activations", {"num_bits": 4, "type": "float", "dynamic": "local"}, "input_activations of 4 bits"),
        ("group_size", 32, "has group_size=32"),
        ("strategy", "group", "has strategy='group'"),
        ("symmetric", False, "has symmetric=False"),
    ],
)
def test_other_variants_are_refused(stored: Path, setting: str, value: Any, message: str) -> None:
    settings = json.loads((stored / "config.json").read_text())
    group = settings["quantization_config"]["config_groups"]["group_0"]
    (group if setting == "input_activations" else group["weights"])[setting] = value
    (stored / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match=f"{message}.*load the float checkpoint"):
        hf_accel.load(stored)
