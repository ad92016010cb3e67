"""The lines of a plan for models that generate no text: each against what a pass of the patched model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    SqueezeBertConfig,
    SqueezeBertModel,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

import hf_accel
from hf_accel.kernels import cpu as kernels
from tests.parity.test_encoders import build, counted

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2,
}  # fmt: skip
WORDS = SIZES | {"vocab_size": 61, "pad_token_id": 1}
SOUND: dict[str, Any] = {
    "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
MADE: dict[str, Any] = {
    "a whole encoder": build,
    "layers": lambda: ModernBertModel(ModernBertConfig(**WORDS)),
    "images": lambda: ViTModel(ViTConfig(**SIZES, image_size=16, patch_size=8)),
    "sound": lambda: Wav2Vec2Model(Wav2Vec2Config(**SIZES, **SOUND)),
    "stock attention": lambda: SqueezeBertModel(SqueezeBertConfig(**WORDS, embedding_size=SIZES["hidden_size"])),
    "causal": lambda: LlamaForSequenceClassification(LlamaConfig(**WORDS)),
}
OTHERS = ("other calls", "module by module")
KEPT = ("keys and values", "no pages")
SAID = {
    "a whole encoder": [OTHERS, ("padding", "left out of a whole pass"), KEPT],
    "layers": [OTHERS, ("padding", "left out of each native layer"), KEPT],
    "images": [OTHERS, KEPT],
    "sound": [OTHERS, ("padding", "computed"), KEPT],
    "stock attention": [("padding", "computed"), KEPT],
    "causal": [OTHERS, ("padding", "left out of each native layer"), KEPT],
}


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = MADE[name]().eval()
    return model


@pytest.mark.parametrize("name", SAID)
def test_passes(name: str) -> None:
    plan = hf_accel.plan(made(name), weights=None)
    lines = [line for line in plan.lines if line.topic == "passes"]
    assert [(line.what, line.choice) for line in lines] == SAID[name]
    assert not [line for line in plan.lines if line.topic in ("cache", "generate")]
    if name == "stock attention":
        layers = [line.choice for line in plan.lines if line.what == "2 encoder layers"]
        assert layers == ["module by module"] and plan.stock_attention
    without = hf_accel.plan(made(name), weights=None, fuse=False).lines
    assert [line.reason for line in without if line.what == "layers"] == ["fuse=False"]


@pytest.mark.parametrize("name", ["a whole encoder", "layers", "sound", "causal"])
@torch.no_grad()
def test_padding_is_what_the_plan_says(name: str) -> None:
    model = hf_accel.patch(made(name), weights=None)
    mask = torch.ones(2, 1600 if name == "sound" else 8, dtype=torch.long)
    mask[1, mask.shape[1] // 2 :] = 0
    first = {"input_values": torch.randn(2, 1600)} if name == "sound" else {"input_ids": torch.full((2, 8), 7)}
    with counted() as calls:
        found = model(**first, attention_mask=mask, output_hidden_states=name == "causal")
    said, states = (
        dict(SAID[name])["padding"],
        found.hidden_states[-1] if name == "causal" else found.last_hidden_state,
    )
    assert calls["layers"] == model.config.num_hidden_layers
    assert (not states[1, -1].any()) == ("left out" in said)
    assert (calls["EncoderStackCalls"] > 0) == ("whole" in said)
