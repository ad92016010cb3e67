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
from hf_accel.patching.calibration.bit_budget import rounding_errors, sensitivities, units_of
from hf_accel.patching.weight_plan import WeightPlan

from ....parity.families import build, prompts
from ....parity.snapshot import snapshot

IDS = prompts(4, 40)


def weights(bits: float, **settings: Any) -> WeightConfig:
    return WeightConfig(**{"average_bits": bits, "group_size": 32, "calibration": IDS, **settings})


def linears(model: PreTrainedModel) -> dict[str, WeightPlan]:
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


def test_a_rounding_error_is_that_of_the_unit_alone() -> None:
    model = build("llama")
    planned = linears(model)
    lost = "model.layers.1.self_attn.k_proj"
    units = rounding_errors(model, planned, lambda p: None if p.site.name == lost else p.site.weight)
    assert {name for unit in units for name in unit.names} == {
        name for name in planned if not (".1." in name and name.endswith(("q_proj", "k_proj", "v_proj")))
    }
    for unit in units:
        copies = [model.get_submodule(name).weight.detach() for name in unit.names]
        groups = torch.cat([weight.reshape(-1, 32) for weight in copies]).double()  # a scale for each row
        largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
        rounded = (groups / (largest / -8)).round().clamp(-8, 7) * (largest / -8)
        assert unit.divergence == pytest.approx(
            float((groups - rounded).square().sum() / groups.square().sum()), rel=1e-3
        )
        assert unit.extra > 0


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


def test_layers_get_eight_bits_by_their_names(tmp_path: Path) -> None:
    named = WeightConfig(4, group_size=32, eight_bits=("down_proj", "model.layers.1.self_attn.o_proj"))
    model = hf_accel.patch(build("llama"), weights=named)
    found = {name for name, bits in bits_of(model).items() if bits == 8}
    assert found == {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.o_proj"}
    counted = hf_accel.estimate(build("llama"), weights=named, bandwidth=1e9).weights_bytes
    assert counted == hf_accel.estimate(model, bandwidth=1e9).weights_bytes
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert bits_of(again) == bits_of(model) and torch.equal(again(IDS).logits, model(IDS).logits)
    with pytest.raises(UnsupportedError, match=r"eight_bits='doun_proj' is the name, .* did you mean 'down_"):
        hf_accel.plan(build("llama"), weights=WeightConfig(4, group_size=32, eight_bits="doun_proj"))


def test_what_cannot_be_met() -> None:
    model = build("llama")
    with pytest.raises(
        UnsupportedError, match=r"average_bits=6 needs calibration=: token ids .* or say bits= instead"
    ):
        hf_accel.patch(model, weights={"average_bits": 6, "group_size": 32})
    with pytest.raises(UnsupportedError, match=r"average_bits=4.5 is not enough: 4 bits .* scales, are 5.000"):
        hf_accel.patch(model, weights=weights(4.5))
    assert not hf_accel.is_patched(model)
