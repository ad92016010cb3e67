"""Encoders: bytes against those of the patched model's tensors, and the longest inputs against the models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    BeitConfig,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    DeiTConfig,
    DeiTModel,
    ElectraConfig,
    HubertConfig,
    HubertForCTC,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

import hf_accel
from hf_accel.errors import HfAccelWarning
from hf_accel.estimate import estimate
from hf_accel.estimate.lengths import longest_input, longest_text
from hf_accel.estimate.shapes import shapes_of
from hf_accel.linear import QuantModule

from .shapes import TINY

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
}  # fmt: skip
IMAGES = {"image_size": 32, "patch_size": 8}
SOUND: dict[str, Any] = {
    "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
MADE: dict[str, Any] = {
    "bert": lambda: BertModel(BertConfig(**SIZES, vocab_size=100)),
    "classifier": lambda: BertForSequenceClassification(BertConfig(**SIZES, vocab_size=100)),
    "roberta": lambda: RobertaModel(RobertaConfig(**SIZES, vocab_size=100)),
    "vit": lambda: ViTModel(ViTConfig(**SIZES, **IMAGES)),
    "clip": lambda: CLIPVisionModel(CLIPVisionConfig(**SIZES, **IMAGES)),
    "wav2vec2": lambda: Wav2Vec2Model(Wav2Vec2Config(**SIZES, **SOUND)),
    "hubert with a head": lambda: HubertForCTC(HubertConfig(**SIZES, **SOUND, vocab_size=30)),
}
LONGEST = {"bert": 512, "classifier": 512, "roberta": 510, "vit": 17, "clip": 17, "wav2vec2": 1500}
SPEED = {"bandwidth": 1e9, "compute": 1e9}


def made(name: str) -> PreTrainedModel:
    model: PreTrainedModel = MADE[name]().eval()
    model.config.architectures = [type(model).__name__]
    return model


def held(model: nn.Module) -> int:
    """The bytes of the parameters, and of the tensors of each quantized layer."""
    packed = [module for module in model.modules() if isinstance(module, QuantModule)]
    return sum(p.nbytes for p in model.parameters()) + sum(module.spec.weight_bytes for module in packed)


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", [None, "int8", {"bits": 4, "group_size": 32}], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_bytes_are_those_of_the_patched_model(name: str, weights: Any) -> None:
    model = made(name)
    found = [estimate(source, weights=weights, **SPEED).weights_bytes for source in (model.config, model)]
    hf_accel.patch(model, weights=weights, keep_original=False if weights else "auto")
    assert found == [held(model)] * 2
    after = estimate(model, **SPEED)
    assert after.weights_bytes == held(model) and after.kv_bytes == 0


@pytest.mark.parametrize("name", ["bert", "vit", "hubert with a head"])
def test_a_quantized_checkpoint_is_counted_as_it_is_stored(name: str, tmp_path: Path) -> None:
    model = hf_accel.patch(made(name), weights={"bits": 4, "group_size": 32})
    model.save_pretrained(tmp_path)
    for source in (tmp_path, AutoConfig.from_pretrained(tmp_path)):
        found = estimate(source, **SPEED)
        assert (found.weights_bytes, found.weights) == (held(model), "int4")
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert found.weights_bytes < stored < 1.1 * found.weights_bytes + 8000  # and the file's header
    assert estimate(tmp_path, weights=None, **SPEED).weights_bytes == estimate(made(name), **SPEED).weights_bytes


@pytest.mark.parametrize("embedding", [None, "int8"])
def test_so_is_a_decoders_with_one_table_and_with_two(embedding: str | None, tmp_path: Path) -> None:
    model = Qwen2ForCausalLM(TINY["qwen2, tied"]).eval()
    hf_accel.patch(model, weights=hf_accel.WeightConfig(bits=8, embedding=embedding), keep_original=False)
    model.save_pretrained(tmp_path)
    assert estimate(tmp_path, **SPEED).weights_bytes == held(model)


@pytest.mark.parametrize("embedding", ["int8", "int4"])
def test_so_is_a_table_of_its_own(embedding: str, tmp_path: Path) -> None:
    model = LlamaForCausalLM(TINY["llama"]).eval()
    weights = hf_accel.WeightConfig(bits=8, embedding=embedding, group_size=32)
    hf_accel.patch(model, weights=weights, keep_original=False)
    model.save_pretrained(tmp_path)
    assert estimate(tmp_path, **SPEED).weights_bytes == held(model)


def test_what_other_programs_have_quantized_is_not_counted_without_a_word() -> None:
    config = TINY["llama"].__class__(**TINY["llama"].to_dict())
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.warns(HfAccelWarning, match="quantized by gptq, in a form that estimate"):
        found = estimate(config, **SPEED)
    assert found.weights_bytes == sum(p.nbytes for p in LlamaForCausalLM(TINY["llama"]).parameters())


@pytest.mark.parametrize("name", LONGEST)
def test_the_context_is_the_longest_input(name: str) -> None:
    found = estimate(made(name), **SPEED)
    assert found.context == LONGEST[name]
    assert f"{LONGEST[name]:,} tokens a pass" in str(found)
    assert estimate(TINY["llama"], **SPEED).context == 4096


@pytest.mark.parametrize("name", ["bert", "roberta"])
@torch.no_grad()
def test_a_text_of_so_many_tokens_is_taken_and_no_longer_one(name: str) -> None:
    model = made(name)
    most = longest_text(model, 10_000)
    ids = torch.full((1, most + 1), 7)
    model(input_ids=ids[:, :most])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids)


@pytest.mark.parametrize(
    "config",
    [ViTConfig(**SIZES, **IMAGES), DeiTConfig(**SIZES, **IMAGES), BeitConfig(**SIZES, **IMAGES)],
    ids=lambda config: config.model_type,
)
@torch.no_grad()
def test_patches_are_those_of_a_pass(config: Any) -> None:
    model = shapes_of(config, dtype=None)
    states = model.to_empty(device="cpu")(pixel_values=torch.zeros(1, 3, 32, 32)).last_hidden_state
    assert longest_input(config, model) == states.shape[1]


def test_a_config_alone_is_the_base_models() -> None:
    assert isinstance(shapes_of(BertConfig(**SIZES), dtype=None), BertModel)
    assert type(shapes_of(ElectraConfig(**SIZES), dtype=None)).__name__ == "ElectraModel"
    assert isinstance(shapes_of(DeiTConfig(**SIZES, **IMAGES), dtype=None), DeiTModel)


def test_what_holds_a_model_is_counted_as_that() -> None:
    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = made("bert")

    holder = hf_accel.patch(Embedder(), weights="int8")
    assert estimate(holder, **SPEED).weights_bytes == held(holder.encoder)
