from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_accel
from hf_accel import UnsupportedError, quantization_report

from ...parity.families import build, prompts

IDS = prompts(4, 24)


def patched(family: str = "llama", **weights: Any) -> PreTrainedModel:
    return hf_accel.patch(build(family), weights={"bits": 4, "group_size": 32, **weights})


def losses(model: PreTrainedModel) -> torch.Tensor:
    """One window after the other, as the report: without our kernels INT4 rounds by the number of rows."""
    with torch.no_grad():
        predicted = torch.cat([model(window).logits[:, :-1] for window in IDS.split(1)])
    return predicted.double().log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_numbers_are_those_of_the_logits(family: str) -> None:
    model, stock = patched(family), build(family)
    report = quantization_report(model, IDS)
    actual, expected = losses(model), losses(stock)
    targets = IDS[:, 1:, None]
    loss, base = (-p.gather(-1, targets).flatten() for p in (actual, expected))
    divergence = (expected.exp() * (expected - actual)).sum(-1).flatten()
    assert report.tokens == len(loss)
    assert report.perplexity == pytest.approx(math.exp(loss.mean()), rel=1e-4)
    assert report.float_perplexity == pytest.approx(math.exp(base.mean()), rel=1e-4)
    assert report.change_percent == pytest.approx(100 * (math.exp((loss - base).mean()) - 1), rel=1e-2, abs=1e-2)
    assert report.change_error == pytest.approx(float(100 * (loss - base).std()) / math.sqrt(len(loss)), rel=1e-2)
    assert report.kl == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert report.kl_error == pytest.approx(float(divergence.std()) / math.sqrt(len(loss)), rel=1e-2)
    assert 0 < report.same_top < 1
    assert hf_accel.is_patched(model)


def test_bits_and_bytes_count_scales() -> None:
    report = quantization_report(patched(head=None), IDS)
    assert report.bits == 4 + 32 / 32  # a float32 scale for each 32 weights
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert report.float_bytes == 4 * weights and report.weight_bytes == weights * 5 // 8
    assert [layer.bits for layer in report.layers] == [5.0, 5.0]


def test_worst_layers_come_first_and_it_can_be_printed_and_stored() -> None:
    report = quantization_report(patched(skip=["layers.1.mlp.up_proj"], symmetric=False), IDS)
    added = [layer.added for layer in report.worst]
    assert added == sorted(added, reverse=True) and sum(added) == pytest.approx(report.layers[-1].error)
    assert json.loads(json.dumps(report.to_dict()))["layers"][1]["name"] == "model.layers.1"
    text = str(report)
    assert f"perplexity, {report.tokens} tokens: {report.float_perplexity:.4f} -> {report.perplexity:.4f}" in text
    assert report.worst[0].name in text


def test_a_reference_takes_the_place_of_originals_that_are_gone(tmp_path: Any) -> None:
    patched().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="the checkpoint is quantized and has no original weights"):
        quantization_report(loaded, IDS)
    assert quantization_report(loaded, IDS, reference=build("llama")) == quantization_report(patched(), IDS)


def test_methods_can_be_compared() -> None:
    kl = [quantization_report(patched(**w), IDS).kl for w in ({}, {"method": "gptq", "calibration": prompts(64, 40)})]
    assert kl[1] < kl[0]


def test_what_cannot_be_compared() -> None:
    with pytest.raises(UnsupportedError, match="has no quantized weights; patch it"):
        quantization_report(build("llama"), IDS)
    with pytest.raises(UnsupportedError, match="a window of one token predicts nothing"):
        quantization_report(patched(), IDS[:, :1])
    with pytest.raises(UnsupportedError, match="calibration= holds no tokens"):
        quantization_report(patched(), [])
