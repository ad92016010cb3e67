"""Layers over weights that other programs quantized: scales of groups, minima, orders of inputs, other dtypes."""

from __future__ import annotations

import copy
import io
import warnings
from dataclasses import replace

import pytest
import torch

from hf_accel.errors import UnsupportedError
from hf_accel.kernels import cpu as kernels
from hf_accel.kernels import triton
from hf_accel.linear import Int4Weight, Int8Weight, LinearSpec, QuantLinear, choose
from hf_accel.linear.formats import QuantizedWeight, state
from hf_accel.linear.layer_settings import spec_of

OUT, IN = 70, 128
KINDS = ["groups", "groups with minima", "minima", "asymmetric", "symmetric", "output"]
BACKENDS = (
    ["reference"]
    + ([] if kernels.refusal() else ["cpu"])
    + ([] if triton.refusal("cpu") else [pytest.param("triton", marks=pytest.mark.gpu)])
)


def stored(kind: str, *, ordered: bool, dtype: torch.dtype = torch.float16, group: int = 32) -> QuantizedWeight:
    order = torch.randperm(IN).to(torch.int32) if ordered else None
    scale = (torch.rand(OUT, 1 if kind == "output" else IN // group) * 0.02 + 1e-3).to(dtype)
    minimum = (torch.rand(scale.shape) * 0.1).to(dtype) if kind.endswith("minima") else None
    if kind in ("groups", "groups with minima", "output"):
        return Int8Weight(torch.randint(-128, 128, (OUT, IN), dtype=torch.int8), scale, order, minimum)
    integers = torch.randint(-8, 8, (OUT, IN), dtype=torch.int8)
    zero_point = torch.randint(-8, 8, scale.shape, dtype=torch.int8) if kind == "asymmetric" else None
    weight = Int4Weight.from_integers(integers, scale, zero_point)
    return replace(weight, weight_minimum=minimum, input_order=order)


def layer_of(weight: QuantizedWeight, backend: str = "auto", dtype: torch.dtype = torch.float32) -> QuantLinear:
    bias = torch.randn(OUT).to(dtype)
    return QuantLinear(weight, bias, activations="auto", backend=backend, dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind, ordered, dtype, backend):
    weight = stored(kind, ordered=ordered)
    layer = layer_of(weight, backend, dtype)
    x = torch.randn(3, 5, IN).to(dtype)
    expected = x.double() @ weight.dequantize(torch.float64).t() + layer.bias.double()
    got = layer(x)
    assert got.dtype is dtype and layer.choice.backend.name == backend
    error = (got.double() - expected).norm() / expected.norm()
    assert error < (0.02 if backend == "cpu" or dtype is not torch.float32 else 1e-5)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_comes_back(kind, ordered):
    weight = stored(kind, ordered=ordered)
    layer = layer_of(weight, dtype=torch.bfloat16).pack()
    x = torch.randn(4, IN).bfloat16()
    expected = layer(x)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    copies = [copy.deepcopy(layer), torch.load(saved, weights_only=False), copy.copy(layer)]
    for one in copies:
        assert torch.equal(one(x), expected)
    kept = layer.state_dict()
    for name, tensor in state(weight).items():
        assert torch.equal(kept[name], tensor) and kept[name].dtype is tensor.dtype
    assert torch.equal(layer.weight, weight.dequantize(torch.bfloat16))
    empty = QuantLinear.empty(layer.spec, bias=True, ordered=ordered)
    empty.load_state_dict(kept)
    assert torch.equal(empty(x), expected)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_settings_describe_it(kind, ordered):
    layer = layer_of(stored(kind, ordered=ordered), dtype=torch.bfloat16).pack()
    settings = layer.layout.module_settings(layer.activations)
    assert settings.get("scale_dtype") == "float16"
    spec = spec_of(settings, torch.empty(OUT, IN, dtype=torch.bfloat16))
    assert spec == layer.spec and settings.get("ordered", False) is ordered


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_writing_keeps_the_layout(kind, ordered):
    weight = stored(kind, ordered=ordered)
    layer = layer_of(weight).pack()
    dense = weight.dequantize(torch.float32)
    layer.weight = dense + 0.01
    after = layer.quantized
    assert (after.bits, after.group_size) == (weight.bits, weight.group_size)
    assert after.symmetric is (weight.symmetric or weight.bits == 8)  # 8 bits without minima are enough
    assert (after.input_order is not None) is ordered
    assert (layer.weight - dense - 0.01).abs().max() < weight.weight_scale.float().max() * 20
    with pytest.raises(UnsupportedError, match="NaN or infinity"):
        layer.weight = dense * torch.nan
    assert torch.equal(layer.weight, after.dequantize(torch.float32))


def test_a_dtype_of_its_own_stays_with_the_scales():
    weight = stored("symmetric", ordered=False)
    layer = layer_of(weight, dtype=torch.bfloat16)
    assert layer.spec.dtype is torch.bfloat16 and layer.spec.layout.scale_dtype is torch.float16
    assert torch.equal(layer.pack().quantized.weight_scale, weight.weight_scale)
    layer.float()
    assert layer.spec.dtype is torch.float32 and layer(torch.randn(2, IN)).dtype is torch.float32


def test_gradients_reach_inputs_in_an_order_of_their_own():
    weight = stored("groups", ordered=True)
    layer = layer_of(weight, "reference")
    x = torch.randn(3, IN, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize(torch.float32).sum(0).expand(3, -1))


@pytest.mark.parametrize(("kind", "reason"), [("groups", "scale for each group"), ("minima", "takes no minima")])
@pytest.mark.parametrize("backend", ["onednn", "torch"])
def test_backends_that_know_only_our_own_formats_refuse(kind, reason, backend):
    spec = LinearSpec.of_stored(stored(kind, ordered=False, dtype=torch.bfloat16), "auto")
    with pytest.raises(UnsupportedError, match=reason if (backend, kind) != ("onednn", "minima") else "INT4"):
        choose(spec, backend)


def test_groups_that_no_kernel_takes_go_to_the_reference():
    weight = Int8Weight(torch.randint(-127, 128, (8, 60), dtype=torch.int8), torch.rand(8, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = QuantLinear(weight, None, activations="auto", backend="auto").pack()
    assert layer.choice.backend.name == "reference"
    x = torch.randn(2, 60)
    torch.testing.assert_close(layer(x), x @ weight.dequantize(torch.float32).t(), rtol=1e-4, atol=1e-4)
