"""Scales are folded into what computes a Linear's inputs only where that changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

import hf_accel
from hf_accel.patching.calibration.folds import find_folds, foldable, folded_parameters
from hf_accel.patching.plan import Fold
from hf_accel.patching.twin import twin

from ....parity.families import DECODER, build, prompts
from ....parity.snapshot import snapshot

IDS = prompts(2, 16)
NORM, AFTER = "input_layernorm", "post_attention_layernorm"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")
DOWN = Fold("mlp.up_proj", ("mlp.down_proj",), None)

EXPECTED: dict[str, set[Fold]] = {
    "llama": {Fold(NORM, QKV, 0.0), Fold(AFTER, GATED, 0.0), DOWN},
    "qwen2": {Fold(NORM, QKV, 0.0), Fold(AFTER, GATED, 0.0), DOWN},
    "gemma2": {Fold(NORM, QKV, 1.0), Fold("pre_feedforward_layernorm", GATED, 1.0), DOWN},
    "gpt2": {Fold("ln_1", ("attn.c_attn",), 0.0), Fold("ln_2", ("mlp.c_fc",), 0.0)},
}


def folds_of(model: PreTrainedModel, skip: str = "none") -> set[Fold]:
    sites = hf_accel.plan(model, weights={"bits": 4, "group_size": 32}).quantized
    names = [p.site.name for p in sites if not p.site.is_head and not p.site.name.endswith(skip)]
    return set(find_folds(twin(model), names))


def layers(model: PreTrainedModel) -> list[str]:
    kind = type(model).model_type if hasattr(type(model), "model_type") else model.config.model_type
    return [f"transformer.h.{i}" if kind == "gpt2" else f"model.layers.{i}" for i in range(2)]


@pytest.mark.parametrize("family", EXPECTED)
def test_folds_of_families(family: str) -> None:
    model = build(family)
    before = snapshot(model)
    expected = {fold.within(layer) for layer in layers(model) for fold in EXPECTED[family]}
    assert folds_of(model) == expected
    assert snapshot(model) == before


def test_v_goes_into_o_where_heads_are_not_shared() -> None:
    model = make(LlamaConfig(**{**DECODER, "num_key_value_heads": 4}))
    assert Fold("self_attn.v_proj", ("self_attn.o_proj",), None).within("model.layers.1") in folds_of(model)


def test_the_plan_says_where_scales_go(capsys: Any) -> None:
    model = build("llama")
    weights = {"bits": 4, "group_size": 32, "method": "awq", "calibration": IDS}
    lines = [(line.what, line.choice, line.reason) for line in hf_accel.plan(model, weights=weights).lines]
    where = "scales are folded into 2 input_layernorm, 2 post_attention_layernorm, 2 up_proj"
    assert ("12 linears, awq", "scales and clips", where) in lines
    assert ("2 linears, awq", "clips only", "no exact place for scales is known: o_proj") in lines


@torch.no_grad()
@pytest.mark.parametrize("family", [*EXPECTED, "all heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_folded_float_model_is_the_model(family: str, dtype: torch.dtype) -> None:
    """Scales of up to 4, folded into the float weights themselves."""
    model = make(LlamaConfig(**{**DECODER, "num_key_value_heads": 4})) if family == "all heads" else build(family)
    model = model.to(dtype)
    expected, folds = model(IDS).logits, folds_of(model)
    assert len(folds) >= 4
    for fold in folds:
        producer, consumers = model.get_submodule(fold.producer), map(model.get_submodule, fold.consumers)
        width = producer.weight.shape[-1] if isinstance(producer, Conv1D) else producer.weight.shape[0]
        scales = foldable(producer, torch.exp2(4 * torch.rand(width) - 2), fold.offset)
        for name, value in folded_parameters(producer, scales, fold.offset).items():
            getattr(producer, name).copy_(value)
        for module in consumers:
            module.weight.mul_(scales.unsqueeze(1) if isinstance(module, Conv1D) else scales)
    got = model(IDS).logits
    assert not torch.equal(got, expected)
    assert (got - expected).norm() <= 20 * torch.finfo(dtype).eps * expected.norm()


def make(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()


def test_a_norm_that_something_else_reads_too_is_left() -> None:
    """One of three Linears on the norm is not to be quantized, or is hidden behind a function."""
    found = folds_of(build("llama"), skip="k_proj")
    assert not [fold for fold in found if fold.producer.endswith(NORM)]
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj = Hidden(layer.mlp.gate_proj)
    found = folds_of(model)
    assert not [fold for fold in found if fold.producer.endswith(AFTER)]
    assert [fold for fold in found if fold.producer.endswith(NORM)]


class Hidden(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.matrix = nn.Parameter(linear.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix.t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_what_a_norm_rounds_is_made_up_for(dtype: torch.dtype, offset: float) -> None:
    norm = nn.LayerNorm(200, bias=False).to(dtype)
    nn.init.normal_(norm.weight, std=0.5)
    norm.weight.data[7] = -offset
    scales = torch.rand(200) + 0.5
    exact = foldable(norm, scales, offset)
    after = folded_parameters(norm, exact, offset)["weight"].float() + offset
    wanted = norm.weight.float() + offset
    once = folded_parameters(norm, scales, offset)["weight"].float() + offset
    assert ((once * exact - wanted).abs() <= 1e-6 * wanted.abs()).all()
    assert (exact > 0).all() and exact.isfinite().all()
    assert (exact / scales - 1).abs().median() < 0.01
    assert after.shape == wanted.shape


def test_rows_and_biases_of_linears_are_divided() -> None:
    scales = torch.rand(24) + 0.5
    x = torch.randn(3, 32)
    for module in (nn.Linear(32, 24), Conv1D(24, 32)):
        nn.init.normal_(module.bias)
        expected = module(x) / scales
        for name, value in folded_parameters(module, scales, None).items():
            module._parameters[name].data = value
        torch.testing.assert_close(module(x), expected)
