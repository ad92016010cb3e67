"""Norms, rotations and gates that Triton computes: recognized, planned and patched as the native ones are.

In Triton's interpreter, where the native library is hidden, or on a GPU.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_accel
from hf_accel.fused.hf.sites import fused_sites
from hf_accel.fused.modules import (
    FusedGate,
    NativeRotary,
    RotaryForm,
    form_of_rotation,
    refusal,
    rotary_form,
)
from hf_accel.fused.norms import NativeNorm, NormForms, norm_form
from hf_accel.kernels import cpu, triton
from tests.devices import triton_device

from .models import ClampedMLP, ClampedRMSNorm, GatedMLP, GemmaRMSNorm, LlamaRMSNorm, Rotating, SwappedMLP
from .test_modules import mixed

DEVICE = triton_device()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton.refusal(DEVICE) is not None, reason=str(triton.refusal(DEVICE))),
]


@pytest.fixture(autouse=True)
def no_library(monkeypatch):
    monkeypatch.setattr(cpu, "refusal", lambda: "it is hidden")
    form_of_rotation.cache_clear()
    torch.manual_seed(0)
    yield
    form_of_rotation.cache_clear()


def sites_of(module: nn.Module, dtype: torch.dtype):
    return fused_sites(nn.ModuleList([module]), dtype, 64, device_type=DEVICE)


def assert_close(got, expected):
    eps = 4 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(got, expected, rtol=eps, atol=eps)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("build", "offset", "round_first"), [(LlamaRMSNorm, 0.0, True), (GemmaRMSNorm, 1.0, False)])
def test_a_norm(build, offset, round_first, dtype):
    module = build(48).to(DEVICE, dtype)
    form = norm_form(module)
    assert form is not None and form.offset == offset
    assert dtype == torch.float32 or form.round_first == round_first
    x = torch.randn(2, 3, 4, 48, device=DEVICE).to(dtype).transpose(1, 2)
    assert_close(mixed(module, NativeNorm, NormForms())(x), module(x))


def test_what_only_looks_like_it_is_left_alone():
    for module, kind in ((ClampedRMSNorm(48), "norm"), (ClampedMLP(8, 8), None)):
        sites, dropped = sites_of(module.to(DEVICE), torch.float32)
        assert (sites, [d.kind.name for d in dropped]) == ([], [kind] if kind else [])


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rotation(dtype):
    module = Rotating().to(dtype)
    form = rotary_form(module, dtype, DEVICE)
    assert form is not None and not form.interleaved
    assert dtype is torch.float32 or form == RotaryForm(interleaved=False, round_each=True)
    q, k = (torch.randn(2, 5, heads, 16, device=DEVICE).to(dtype).transpose(1, 2) for heads in (4, 2))
    tables = [torch.randn(2, 5, 16, device=DEVICE).to(dtype) for _ in range(2)]
    rotated = mixed(module, NativeRotary, form)(q, k, tables=tables)
    for got, expected in zip(rotated, module(q, k, tables=tables), strict=True):
        assert_close(got, expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", [F.silu, nn.GELU(), nn.GELU(approximate="tanh")], ids=["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("build", [GatedMLP, SwappedMLP])
def test_a_gate(build, act, dtype):
    module = build(40, 70, act, bias=True).to(DEVICE, dtype)
    sites, dropped = sites_of(module, dtype)
    assert ([(site.kind.name, site.mixin) for site in sites], dropped) == ([("gate", FusedGate)], [])
    fused = mixed(module, FusedGate, sites[0].state)
    x = torch.randn(2, 3, 40, device=DEVICE).to(dtype)
    assert_close(fused(x), module(x))
    seen = []
    fused.gate_proj.register_forward_hook(lambda *args: seen.append(1))
    fused(x)
    assert seen == [1]


def test_gradients_bring_the_original_back():
    module = GatedMLP(16, 24).to(DEVICE)
    fused = mixed(module, FusedGate, sites_of(module, torch.float32)[0][0].state)
    x = torch.randn(3, 16, device=DEVICE)
    fused(x).sum().backward()
    module(x).sum().backward()
    for ours, theirs in zip(fused.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@torch.no_grad()
@pytest.mark.parametrize("weights", [None, "int4"])
def test_a_patched_model(weights):
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(DEVICE)
    ids = torch.arange(12, device=DEVICE)[None]
    options = {"weights": hf_accel.WeightConfig(bits=4, group_size=32) if weights else None, "attention": None}
    plain = copy.deepcopy(model)
    hf_accel.patch(plain, fuse=False, **options)
    plan = hf_accel.plan(model, **options)
    hf_accel.patch(model, **options)
    assert sorted({site.kind.name for site in plan.fused.sites}) == ["gate", "norm", "rotary"]
    assert not (plan.fused.linears or plan.fused.dropped)
    got, expected = model(ids).logits, plain(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(got, expected) or DEVICE == "cuda"
    hf_accel.unpatch(model)
    hf_accel.unpatch(plain)
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_who_computes(monkeypatch):
    assert refusal(DEVICE) is None
    monkeypatch.setattr(triton, "refusal", lambda device_type: f"not on {device_type}")
    assert (refusal("cpu"), refusal("cuda")) == ("it is hidden", "not on cuda")
    monkeypatch.setattr(cpu, "refusal", lambda: None)
    assert refusal("cpu") is None
