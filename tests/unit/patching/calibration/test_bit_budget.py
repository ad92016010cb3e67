"""A budget of bits goes where 4 bits would hurt most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_accel
from hf_accel import UnsupportedError, WeightConfig
from hf_accel.linear import QuantLinear
from hf_accel.patching.calibration.bit_budget import sensitivities, units_of
from hf_accel.patching.plan import LinearPlan

from ....parity.families import build, prompts
from ....parity.snapshot import snapshot

IDS = prompts(4, 40)


def weights(bits: float, **settings: Any) -> WeightConfig:
    return WeightConfig(**{"average_bits": bits, "group_size": 32, "calibration": IDS, **settings})


def linears(model: PreTrainedModel) -> dict[str, LinearPlan]:
    plan = hf_accel.plan(model, weights={"bits": 4, "group_size": 32, "head": None})
    return {p.site.name: p for p in plan.quantized}


def bits_of(model: PreTrainedModel) -> dict[str, int]:
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear) and name != "lm_head"}
    return {name: layer.layout.bits for name, layer in layers.items()}


def average(model: PreTrainedModel) -> float:
    layers = [model.get_submodule(name) for name in bits_of(model)]
    return 8 * sum(x.spec.weight_bytes for x in layers) / sum(x.in_features * x.out_features for x in layers)


def test_units_are_what_is_called_on_one_tensor() -> None:
    model = build("llama")
    ends = [tuple(name.rpartition(".")[2] for name in unit) for unit in units_of(model, linears(model))]
    assert ends == 2 * [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]


@torch.no_grad()
def test_a_divergence_is_that_of_the_unit_alone() -> None:
    model = build("llama")
    before = snapshot(model)
    for unit in sensitivities(model, linears(model), IDS):
        ends = tuple(name for name in linears(model) if name not in unit.names)
        rounded = hf_accel.patch(
            build("llama"), weights=WeightConfig(bits=4, group_size=32, head=None, skip=ends, activations=None)
        )
        actual, expected = (m(IDS).logits.double().log_softmax(-1) for m in (rounded, model))
        divergence = (expected.exp() * (expected - actual)).sum(-1).mean()
        assert unit.divergence == pytest.approx(float(divergence), rel=0.02)
    assert snapshot(model) == before


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("bits", [5.5, 6, 7])
def test_the_budget_is_kept_and_spent(family: str, bits: float) -> None:
    model = hf_accel.patch(build(family), weights=weights(bits))
    found = bits_of(model)
    assert set(found.values()) == {4, 8}
    assert bits - 1.2 < average(model) <= bits
    for unit in units_of(hf_accel.unpatch(model), linears(model)):
        assert len({found[name] for name in unit}) == 1


def test_the_unit_that_gains_most_per_byte_gets_the_bits_first() -> None:
    model = build("llama")
    units = sensitivities(model, linears(model), IDS)
    best = max(units, key=lambda unit: unit.divergence / unit.extra)
    count = sum(p.site.weight.numel() for p in linears(model).values())
    found = bits_of(hf_accel.patch(model, weights=weights(5 + 8 * best.extra / count)))
    assert {name for name, bits in found.items() if bits == 8} == set(best.names)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_with_every_method_and_taken_back(method: str, tmp_path: Path) -> None:
    model = build("qwen2")
    before = snapshot(model)
    hf_accel.patch(model, weights=weights(6, method=method, symmetric=False))
    expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, expected)
    assert snapshot(hf_accel.unpatch(model)) == before


def test_loading_and_planning_agree_with_patching(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    settings = hf_accel.AccelConfig(weights=weights(6))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    plan = hf_accel.plan(build("llama"), weights=weights(6))
    assert bits_of(loaded) == {p.site.name: p.config.bits for p in plan.quantized if not p.site.is_head}


def test_what_cannot_be_met() -> None:
    model = build("llama")
    with pytest.raises(
        UnsupportedError, match=r"average_bits=6 needs calibration=: token ids .* or say bits= instead"
    ):
        hf_accel.patch(model, weights={"average_bits": 6, "group_size": 32})
    with pytest.raises(UnsupportedError, match=r"average_bits=4.5 is not enough: 4 bits .* groups of 32, are 5.000"):
        hf_accel.patch(model, weights=weights(4.5))
    assert not hf_accel.is_patched(model)
