"""Encoders with a decoder: against the models themselves, and what the pages of a patched one take."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import hf_accel
from hf_accel.checkpoints import fitting
from hf_accel.errors import UnsupportedError
from hf_accel.estimate import estimate

SPEED = {"bandwidth": 1e9, "compute": 1e9}
SIZES = {
    "d_model": 64, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
CONFIGS: dict[str, tuple[PreTrainedConfig, Any]] = {
    "t5": (
        T5Config(vocab_size=128, d_model=64, d_kv=24, num_heads=4, d_ff=96, num_layers=3, num_decoder_layers=2,
                 decoder_start_token_id=0),
        T5ForConditionalGeneration,
    ),
    "bart": (BartConfig(**SIZES, max_position_embeddings=80), BartForConditionalGeneration),
    "marian": (MarianConfig(**SIZES, max_position_embeddings=80), MarianMTModel),
    "whisper": (WhisperConfig(**SIZES, max_source_positions=40, max_target_positions=32, num_mel_bins=8),
                WhisperForConditionalGeneration),
}  # fmt: skip
CONTEXT = 32


def built(name: str) -> Any:
    config, kind = CONFIGS[name]
    return kind(copy.deepcopy(config)).eval()


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("weights", [None, "int8"])
def test_weights_are_those_of_the_model(name: str, weights: str | None) -> None:
    config, kind = CONFIGS[name]
    found = estimate(config, context=CONTEXT, weights=weights, **SPEED)
    assert found.model == kind.__name__
    model = hf_accel.patch(built(name), weights=weights, keep_original=False)
    held = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    if weights is None:
        assert found.weights_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert found.weights_bytes == pytest.approx(sum(tensor.nbytes for tensor in held.values()), rel=0.05)
    assert estimate(model, context=CONTEXT, **SPEED).weights_bytes == found.weights_bytes


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_the_cache_is_what_pages_take(name: str, dtype: str) -> None:
    """Those of the decoder's own tokens, and those of as many tokens of the source, which are kept once."""
    model = hf_accel.patch(built(name), weights=None, cache={"max_tokens": CONTEXT, "dtype": dtype})
    with hf_accel.Engine(model) as engine:
        engine.submit(list(range(3, 20)), max_new_tokens=4).result()
        groups = engine.session.pages.groups
        assert estimate(model, context=CONTEXT, **SPEED).kv_bytes == sum(group.nbytes for group in groups)
        assert len(groups) == 2


def test_the_source_of_a_sound_has_one_length() -> None:
    each = 2 * 2 * 64 * 4  # of a token: keys and values of two layers in float32
    found = estimate(CONFIGS["whisper"][0], batch=3, **SPEED)
    assert (found.context, found.kv_bytes) == (32, 3 * each * (32 + 40))
    assert estimate(CONFIGS["whisper"][0], context=8, **SPEED).kv_bytes == each * (8 + 40)
    assert found.counted.workload.at(context=8, batch=1).kv_bytes == each * (8 + 40)
    assert estimate(CONFIGS["bart"][0], **SPEED).kv_bytes == each * (80 + 80)  # as many as it has positions for


def test_a_source_is_read_by_the_encoder_once_and_a_token_by_the_decoder() -> None:
    model, batch = built("t5"), 3
    found = estimate(model, context=CONTEXT, batch=batch, **SPEED)

    def numbers(part: Any, *, ending: tuple[str, ...] = ("",)) -> int:
        linears = {name: module for name, module in part.named_modules() if isinstance(module, nn.Linear)}
        return sum(module.weight.numel() for name, module in linears.items() if name.endswith(ending))

    crossing = numbers(model.decoder, ending=("EncDecAttention.k", "EncDecAttention.v"))
    decoder, head = numbers(model.decoder) - crossing, model.lm_head.weight.numel()
    inner = 4 * 24
    attention = 4 * inner * CONTEXT  # of one query in one layer
    prefill = 2 * (numbers(model.encoder) + crossing) * CONTEXT + 2 * (decoder + head)
    prefill += 3 * attention * CONTEXT + 2 * attention  # three encoder layers; the first token, which sees the source
    assert found.prefill_seconds == pytest.approx(batch * prefill / 1e9)
    others = sum(p.numel() for module in (model.decoder,) for p in module.parameters()) - numbers(model.decoder)
    others -= model.decoder.embed_tokens.weight.numel()
    biases = [m for n, m in model.decoder.named_modules() if n.endswith("relative_attention_bias")]
    others -= sum(module.weight.numel() for module in biases)  # of which a token reads a row
    assert found.read_bytes == 4 * (decoder + head + others) + found.kv_bytes
    step = 2 * (decoder + head) + 2 * 2 * attention
    assert found.seconds_per_token == pytest.approx(max(found.read_bytes, batch * step) / 1e9)


def test_loads_are_not_counted() -> None:
    with pytest.raises(UnsupportedError, match="reads its prompts with an encoder"):
        estimate(CONFIGS["t5"][0], context=64, **SPEED).serving(
            requests_per_second=1, prompt_tokens=2, output_tokens=2
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_memory_is_filled(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a cache are never fewer than a sound has."""
    # Let the memory be the model's alone: what the process of the tests has taken is another number every time.
    monkeypatch.setattr(fitting, "process_bytes", lambda: 0)
    built(name).save_pretrained(tmp_path)
    plenty = hf_accel.plan(tmp_path, fit=10**9)
    assert plenty.config.weights is None and plenty.config.cache is not None
    if name == "whisper":
        assert plenty.config.cache.max_tokens >= 40
    with pytest.raises(UnsupportedError, match="is too small") as refused:
        hf_accel.plan(tmp_path, fit=1000)
    named = re.search(r"give fit='(.+)' or more", str(refused.value))
    assert named is not None
    small = hf_accel.plan(tmp_path, fit=named[1])
    assert small.config.cache is not None


@pytest.mark.parametrize("architecture", ["T5Model", "BartModel"])
def test_one_without_a_head_is_refused(architecture: str) -> None:
    config = copy.deepcopy(CONFIGS["t5" if architecture == "T5Model" else "bart"][0])
    config.architectures = [architecture]
    with pytest.raises(UnsupportedError, match="an encoder-decoder without a head"):
        estimate(config, **SPEED)


def test_here(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert (estimate(CONFIGS["t5"][0], context=8, weights="int8").seconds_per_token or 0) > 0
