"""Layers that are called on one tensor: one call, and never another result than each alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_accel.config import WeightConfig
from hf_accel.fused import projections
from hf_accel.fused.projections import UNLIMITED, FusedProjections, NativeLinear, ProjectionCall, is_bare_linear
from hf_accel.kernels import cpu as kernels
from hf_accel.linear import QuantLinear
from hf_accel.undo.journal import mixed_class
from hf_accel.undo.state import FUSED, FUSED_PROJECTIONS

from ..linear.layers import quantized_layer
from .models import Attention

FLOAT_ROWS = 16
pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))


def quantized(bits: int) -> Attention:
    module = Attention(64)
    config = WeightConfig(bits=bits, group_size=32)
    for name, layer in list(module.named_children()):
        setattr(module, name, quantized_layer(layer.weight, layer.bias, config=config))
    return module


def floating() -> Attention:
    module = Attention(64)
    for layer in module.children():
        layer.__class__ = mixed_class(NativeLinear, nn.Linear)
        vars(layer)[FUSED] = ProjectionCall(FLOAT_ROWS)
    return module


def fuse(module: Attention) -> FusedProjections:
    fused = FusedProjections(list(module.children()), FLOAT_ROWS)
    for layer in module.children():
        if isinstance(layer, QuantLinear):
            layer.fused_projections = fused
        else:
            vars(layer)[FUSED_PROJECTIONS] = fused
    return fused


BUILDS = [lambda: quantized(8), lambda: quantized(4), floating]


@pytest.fixture(params=BUILDS, ids=["int8", "int4", "float"])
def module(request):
    return request.param()


@torch.no_grad()
def test_the_same_bits_as_each_alone(module):
    x = torch.randn(2, 3, 64)
    alone = module(x)
    fused = fuse(module)
    for got, expected in zip(module(x), alone, strict=True):
        assert torch.equal(got, expected)
    assert fused.pending is None
    q, k, _ = module(x)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()  # one buffer


@torch.no_grad()
def test_another_tensor_or_a_changed_one_is_computed_alone(module):
    x, y = torch.randn(3, 64), torch.randn(3, 64)
    expected_x, expected_y = module(x), module(y)
    fuse(module)
    assert torch.equal(module.q_proj(x), expected_x[0])
    assert torch.equal(module.k_proj(y), expected_y[1])
    assert torch.equal(module.v_proj(x.clone()), expected_x[2])
    module.q_proj(x)
    x.copy_(y)
    assert torch.equal(module.k_proj(x), expected_y[1])


@torch.no_grad()
def test_asking_twice_or_in_another_order(module):
    x = torch.randn(3, 64)
    expected = module(x)
    fuse(module)
    for index in (1, 0, 0, 2, 2, 1):
        assert torch.equal(list(module.children())[index](x), expected[index])


@torch.inference_mode()
def test_inference_tensors_have_no_version(module):
    x = torch.randn(3, 64)
    expected = module(x)
    fuse(module)
    assert all(torch.equal(a, b) for a, b in zip(module(x), expected, strict=True))


def test_gradients_flow_as_without():
    module = floating()
    fuse(module)
    x = torch.randn(3, 64, requires_grad=True)
    torch.cat(module(x), dim=-1).sum().backward()
    expected = sum(layer.weight.sum(0) for layer in module.children())
    torch.testing.assert_close(x.grad, expected.expand(3, -1))


@torch.no_grad()
def test_many_rows_of_float_weights_go_to_torch():
    module = floating()
    fused = fuse(module)
    x = torch.randn(FLOAT_ROWS + 1, 64)
    got = module(x)
    assert torch.equal(got[0], nn.functional.linear(x, module.q_proj.weight, module.q_proj.bias))
    assert fused.pending is None


@torch.no_grad()
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_fuses_its_own_layers(module, clone):
    x = torch.randn(3, 64)
    fuse(module)
    expected = module(x)
    module.q_proj(x)  # leaves something pending
    twin = clone(module)
    del module
    assert all(torch.equal(a, b) for a, b in zip(twin(x), expected, strict=True))
    layer = twin.k_proj
    fused = layer.fused_projections if isinstance(layer, QuantLinear) else vars(layer)[FUSED_PROJECTIONS]
    assert fused.layers[1] is layer


@torch.no_grad()
def test_mixed_formats_are_computed_alone():
    module = quantized(8)
    module.k_proj = quantized(4).k_proj
    x = torch.randn(3, 64)
    expected = module(x)
    fuse(module)
    assert all(torch.equal(a, b) for a, b in zip(module(x), expected, strict=True))


def test_plain_is_without_hooks_and_of_a_known_kind():
    layer = nn.Linear(4, 4)
    assert is_bare_linear(layer)
    assert is_bare_linear(floating().q_proj)
    assert not is_bare_linear(nn.Sequential(layer))
    layer.register_forward_pre_hook(lambda *args: None)
    assert not is_bare_linear(layer)


@pytest.mark.parametrize(
    ("level", "in_torch", "rows"),
    [
        ("avx2", False, UNLIMITED),
        ("avx_vnni", False, UNLIMITED),
        ("avx2", True, 16),
        ("avx512_vnni_bf16", False, 64),
        ("amx", True, 16),
    ],
)
def test_half_precision_stays_native_where_torch_is_slow(
    level: str, in_torch: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projections, "isa", lambda: level)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: in_torch)
    assert projections.native_rows(torch.bfloat16) == rows
    assert projections.native_rows(torch.float16) == (128 if in_torch else UNLIMITED)
    assert (projections.native_rows(torch.float32), projections.native_rows(torch.float64)) == (128, 0)


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_tiles_take_all_rows_only_where_no_row_is_torchs() -> None:
    layer, x = nn.Linear(8, 4).bfloat16().requires_grad_(False), torch.ones(2, 8).bfloat16()
    for float_rows, tile_rows in ((UNLIMITED, 1), (16, 16)):
        call = projections.ProjectionCall(float_rows).ready((layer,), x)
        assert call is not None
        assert call.tile_rows == tile_rows
