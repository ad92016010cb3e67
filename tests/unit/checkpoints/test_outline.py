"""A model without its weights: the plan is that of the real one, and memory is not asked for."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import hf_accel
from benchmarks.harness.peak import resident
from hf_accel.checkpoints.outline import outline
from hf_accel.errors import UnsupportedError
from hf_accel.patching.plan import Plan

SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, dtype="bfloat16"),
    "tied": LlamaConfig(**SHAPE, dtype="float32", tie_word_embeddings=True),
    "mixture": MixtralConfig(**SHAPE, dtype="bfloat16", num_local_experts=4, num_experts_per_tok=2),
}


def choices(plan: Plan) -> list[dict[str, Any]]:
    """Without what is measured anew each time."""
    return [vars(line) for line in plan.lines if line.topic != "speed"]


@pytest.mark.parametrize("keywords", [{}, {"weights": None}, {"weights": {"bits": 4, "group_size": 32}}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_is_that_of_the_checkpoint(name: str, keywords: dict[str, Any], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS[name], dtype=CONFIGS[name].dtype).save_pretrained(tmp_path)
    planned = hf_accel.plan(tmp_path, **keywords)
    loaded = hf_accel.plan(AutoModelForCausalLM.from_pretrained(tmp_path), **keywords)
    assert choices(planned) == choices(loaded)
    assert (planned.bytes_before, planned.bytes_after) == (loaded.bytes_before, loaded.bytes_after)


ENCODER: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [
        BertForSequenceClassification(BertConfig(**ENCODER)),
        BertForMaskedLM(BertConfig(**ENCODER)),
        ViTModel(ViTConfig(**ENCODER, image_size=32)),
        T5ForConditionalGeneration(T5Config(vocab_size=256, d_model=64, d_kv=32, d_ff=96, num_layers=2, num_heads=2)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_the_plan_of_what_is_no_decoder(model: Any, tmp_path: Path) -> None:
    """It is that of the class which config.json names, and tells no speed of decode where there is no decode."""
    model.save_pretrained(tmp_path)
    planned = hf_accel.plan(tmp_path, weights="int8")
    loaded = hf_accel.plan(type(model).from_pretrained(tmp_path), weights="int8")
    assert type(planned.model) is type(model) and choices(planned) == choices(loaded)
    (speed,) = (line for line in planned.lines if line.topic == "speed")
    assert ("decode" in speed.what) == ("a token" in speed.choice) == model.can_generate()


def test_a_path_in_python_as_in_the_shell(tmp_path: Path) -> None:
    """Of a path no weight is read, and its context is 4,096 tokens if nobody says otherwise."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    model.config.save_pretrained(tmp_path)
    settings = hf_accel.PatchConfig.build(weights=None)
    assert choices(hf_accel.plan(str(tmp_path), config=settings)) == choices(hf_accel.plan(tmp_path, weights=None))
    assert hf_accel.plan(tmp_path, dtype=torch.float32).bytes_before > 1.9 * hf_accel.plan(tmp_path).bytes_before
    assert hf_accel.estimate(tmp_path, bandwidth=1e9).context == 4096
    assert choices(hf_accel.plan(model, weights=None)) == choices(hf_accel.plan(model, config=settings))
    with pytest.raises(UnsupportedError, match="leave dtype= out"):
        hf_accel.plan(model, dtype=torch.float32)
    for path, reason in (("/no/such", "no model config can be read"), ("a.gguf", "GGUF")):
        with pytest.raises(UnsupportedError, match=reason):
            hf_accel.plan(path)


def test_what_is_not_stored_like_this_is_kept_in_memory(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert hf_accel.plan(tmp_path).on_disk
    assert hf_accel.plan(tmp_path, dtype=torch.float32).on_disk is None
    shutil.move(tmp_path / "model.safetensors", tmp_path / "elsewhere.safetensors")
    assert hf_accel.plan(tmp_path).on_disk is None


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_weights_take_no_memory() -> None:
    config = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=4)
    before = resident()
    model = outline(config, dtype=torch.float32)
    after = resident()
    assert before is not None and after is not None
    assert sum(after.values()) - sum(before.values()) < 0.1 * sum(p.nbytes for p in model.parameters())


def test_what_only_the_weights_tell(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="load the model"):
        hf_accel.plan(tmp_path, weights={"bits": 4, "method": "awq", "calibration": [[1, 2, 3]]})
    hf_accel.patch(model).save_pretrained(tmp_path / "int8")
    with pytest.raises(UnsupportedError, match="quantized already"):
        hf_accel.plan(tmp_path / "int8")
