"""INT4 weights with zero points, and 3 and 2 bits, through a whole model: planned, patched, copied, saved, loaded."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_accel
from hf_accel.kernels import cpu as kernels
from hf_accel.linear import QuantLinear
from hf_accel.linear.formats import kind_of, state, zero_point_bytes

from .dequantize import dequantized
from .snapshot import snapshot
from .test_quantized import INT4_TOLERANCE, relative_error

SHIPPED = Path(__file__).parents[2] / "examples" / "stdlib-tiny"
CONFIGS = [
    hf_accel.WeightConfig(bits=bits, group_size=size, symmetric=symmetric)
    for bits, size, symmetric in [(4, 32, False), (4, 128, False), (3, 64, False), (3, 128, True), (2, 32, False)]
]


@pytest.fixture(params=CONFIGS, ids=lambda config: f"{config.label} g{config.group_size}")
def config(request: pytest.FixtureRequest) -> hf_accel.WeightConfig:
    return request.param


def load(folder: Path = SHIPPED, **keywords: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **keywords).eval()


def ids() -> Tensor:
    return torch.arange(2, 42).view(2, 20)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(ids()).logits


def quant_layers(model: PreTrainedModel) -> dict[str, QuantLinear]:
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, QuantLinear) and layer.layout.bits < 8
    }


def test_patched_computes_with_its_dequantized_weights(config: hf_accel.WeightConfig) -> None:
    stock = load()
    before = snapshot(stock)
    expected = copy.deepcopy(stock)
    hf_accel.patch(stock, weights=config)
    layers = quant_layers(stock)
    assert len(layers) == 7 * stock.config.num_hidden_layers
    if not config.symmetric:
        zero_points = torch.cat([layer.quantized.zero_points().flatten() for layer in layers.values()])
        assert len(zero_points.unique()) > config.bits
    assert relative_error(logits(stock), logits(dequantized(expected, stock))) < INT4_TOLERANCE
    hf_accel.unpatch(stock)
    assert snapshot(stock) == before


def test_fused_and_unfused_agree(config: hf_accel.WeightConfig) -> None:
    fused, plain = (
        logits(hf_accel.patch(load(dtype=torch.float32), weights=config, fuse=fuse)) for fuse in (True, False)
    )
    assert relative_error(fused, plain) < 1e-3


def test_saved_and_loaded_bit_for_bit(config: hf_accel.WeightConfig, tmp_path: Path) -> None:
    model = hf_accel.patch(load(), weights=config)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules"]
    found = {(saved[name]["bits"], saved[name]["symmetric"]) for name in quant_layers(model)}
    assert found == {(config.bits, config.symmetric)}
    again = load(tmp_path)
    assert quant_layers(again).keys() == quant_layers(model).keys()
    for name, layer in quant_layers(again).items():
        weight, other = layer.quantized, model.get_submodule(name).quantized
        assert type(weight) is type(other) is kind_of(config.layout)
        assert state(weight).keys() == state(other).keys()
        assert all(torch.equal(tensor, state(other)[kind]) for kind, tensor in state(weight).items())
    assert torch.equal(logits(again), logits(model))


def test_packed_while_loading_as_patched_afterwards(config: hf_accel.WeightConfig) -> None:
    loaded = load(quantization_config=hf_accel.AccelConfig(weights=config))
    assert torch.equal(logits(loaded), logits(hf_accel.patch(load(), weights=config)))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_the_same(copier: object) -> None:
    model = hf_accel.patch(load(), weights=CONFIGS[0])
    assert torch.equal(logits(copier(model)), logits(model))


def test_lower_bits_take_fewer_bytes_and_say_who_multiplies() -> None:
    model = load()
    plans = {bits: hf_accel.plan(model, weights={"bits": bits}) for bits in (4, 3, 2)}
    count = sum(p.site.weight.numel() for p in plans[4].quantized if not p.site.is_head)
    assert [plans[bits].bytes_after - plans[bits - 1].bytes_after for bits in (4, 3)] == [count // 8] * 2
    for bits in (3, 2):
        by = "reference" if kernels.refusal() else "cpu"
        assert f"int{bits} group 128 by {by}" in str(plans[bits])
        slow = any(line.reason.startswith(f"no kernel here multiplies by {bits} bits") for line in plans[bits].lines)
        assert slow == (by == "reference")


@pytest.mark.parametrize("config", [c for c in CONFIGS if not c.symmetric], ids=lambda c: f"{c.label} g{c.group_size}")
def test_the_plan_and_the_estimate_count_zero_points(config: hf_accel.WeightConfig) -> None:
    model = load()
    symmetric = dataclasses.replace(config, symmetric=True)
    plans = [hf_accel.plan(model, weights=weights) for weights in (symmetric, config)]
    shapes = [p.site.weight.shape for p in plans[1].quantized if not p.site.is_head]
    zero_points = sum(zero_point_bytes(out, inputs // config.group_size, config.bits) for out, inputs in shapes)
    assert plans[1].bytes_after - plans[0].bytes_after == zero_points > 0
    assert f"int{config.bits} asymmetric group {config.group_size} by " in str(plans[1])
    assert "asymmetric" not in str(plans[0])
    machine = {"context": 1, "bandwidth": 1e9, "compute": 1e12}
    estimates = [hf_accel.estimate(model.config, weights=weights, **machine) for weights in (symmetric, config)]
    assert estimates[1].weights == f"int{config.bits} asymmetric"
    scales = [e.weights_by_kind["scales"] for e in estimates]
    assert scales[1] - scales[0] == estimates[1].weights_bytes - estimates[0].weights_bytes == zero_points
