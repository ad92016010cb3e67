"""Norms, rotations, gated MLPs: recognized by what they do, and equal to the original."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm import modeling_glm

from hf_accel.fused import norms
from hf_accel.fused.hf.sites import fused_sites
from hf_accel.fused.modules import (
    GatedCall,
    NativeGatedMLP,
    NativeRotary,
    RotaryForm,
    form_of_rotation,
    rotary_form,
)
from hf_accel.fused.norms import NativeNorm, NormForm, NormForms, norm_form
from hf_accel.kernels import cpu as kernels
from hf_accel.undo.journal import mixed_class
from hf_accel.undo.state import FUSED

from . import models
from .models import (
    Attention,
    BufferNorm,
    ClampedMLP,
    ClampedRMSNorm,
    GatedMLP,
    GemmaRMSNorm,
    LlamaRMSNorm,
    PlainNorm,
    Rotating,
    SwappedMLP,
)

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def mixed(module: nn.Module, mixin: type, state: object) -> nn.Module:
    twin = copy.deepcopy(module)
    twin.__class__ = mixed_class(mixin, type(module))
    vars(twin)[FUSED] = state
    return twin


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("build", "offset", "round_first"), [(LlamaRMSNorm, 0.0, True), (GemmaRMSNorm, 1.0, False)])
def test_a_norm_is_recognized_and_equal(build, offset, round_first, dtype):
    module = build(48).to(dtype)
    form = norm_form(module)
    assert form is not None
    assert form.offset == offset
    assert dtype == torch.float32 or form.round_first == round_first
    native = mixed(module, NativeNorm, NormForms())
    x = torch.randn(2, 3, 4, 48).to(dtype).transpose(1, 2)  # as a norm of heads gets it
    with torch.no_grad():
        got, expected = native(x), module(x)
    assert torch.equal(got, expected) or (dtype == torch.float32 and torch.allclose(got, expected, rtol=3e-7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_without_a_weight_is_recognized_and_equal(dtype):
    """Of any width, whatever its buffer holds; on another device than the CPU it has no native call."""
    module = PlainNorm(7)
    assert norm_form(module, dtype) == NormForm(1e-6, 0.0, False)
    native = mixed(module, NativeNorm, NormForms())
    for width in (5, 48):
        x = (torch.randn(2, 3, 4, 2 * width) * 40).to(dtype)[..., width:]
        with torch.no_grad():
            got, expected = native(x), module(x)
        assert torch.equal(got, expected) or (dtype == torch.float32 and torch.allclose(got, expected, rtol=3e-7))
    sites, _ = fused_sites(nn.Sequential(module), torch.float32, 64)
    assert [site.name for site in sites] == ["0"]
    sites, dropped = fused_sites(nn.Sequential(module), torch.float32, 64, device_type="cuda")
    assert not sites and [each.name for each in dropped] == ["0"]


def test_what_only_looks_like_a_norm_is_left_alone():
    assert norm_form(BufferNorm(norms.WITHOUT_WEIGHT)) is None
    assert norm_form(nn.LayerNorm(48, elementwise_affine=False)) is None
    assert norm_form(ClampedRMSNorm(48)) is None
    assert norm_form(nn.LayerNorm(48)) is None
    assert norm_form(nn.Linear(4, 4)) is None
    unlike = LlamaRMSNorm(48)
    unlike.variance_epsilon = 1  # type: ignore[assignment]  # no float
    assert norm_form(unlike) is None
    _, dropped = fused_sites(nn.Sequential(ClampedRMSNorm(48)), torch.float32, 64)
    assert [(d.name, d.kind.name) for d in dropped] == [("0", "norm")]
    assert "differs" in dropped[0].reason


class RoundedLastRMSNorm(LlamaRMSNorm):
    """Multiplies by the weight before it rounds, as OLMo 2 does: of a weight of ones, the same as LlamaRMSNorm."""

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * x).to(hidden_states.dtype)


def test_norms_of_one_code_have_one_form(monkeypatch):
    """It is known after one trial, which does not depend on what the weight happens to be."""
    plain, other = RoundedLastRMSNorm(48).bfloat16(), RoundedLastRMSNorm(48).bfloat16()
    nn.init.ones_(plain.weight)
    nn.init.normal_(other.weight)
    form = norm_form(plain)
    assert form == NormForm(plain.variance_epsilon, 0.0, False)
    calls = []
    monkeypatch.setattr(norms, "rms_norm", lambda *args, **kwargs: calls.append(args))
    assert norm_form(other) == form and not calls
    assert norm_form(RoundedLastRMSNorm(40).bfloat16()) is None and calls, "another width is tried by itself"


def test_a_setting_that_code_reads_is_tried_again():
    class Switched(LlamaRMSNorm):
        def __init__(self, size):
            super().__init__(size)
            self.clamps, self.limits = False, (1.0,)

        def forward(self, hidden_states):
            normed = super().forward(hidden_states)
            return normed.clamp(-self.limits[0], self.limits[0]) if self.clamps else normed

    module = Switched(48)
    assert norm_form(module) is not None
    module.clamps = True
    assert norm_form(module) is None
    module.limits = (1e9,)
    assert norm_form(module) is not None
    module.limits = [1e9]
    assert norm_form(module) is not None
    module.limits[0] = 1.0  # what can change inside is tried each time
    assert norm_form(module) is None
    forward = Switched.forward
    Switched.forward = lambda self, x: forward(self, x).clamp(-1e9, 1e9)
    assert norm_form(module) is None


def test_eps_is_the_modules_own():
    small, large = LlamaRMSNorm(48, eps=1e-6), LlamaRMSNorm(48, eps=1e-2)
    assert (norm_form(small), norm_form(large)) == (NormForm(1e-6, 0.0, True), NormForm(1e-2, 0.0, True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rotation_is_recognized_and_equal(dtype):
    module = Rotating().to(dtype)
    form = rotary_form(module, dtype)
    assert form == RotaryForm(interleaved=False, round_each=True)
    native = mixed(module, NativeRotary, form)
    q, k = torch.randn(2, 5, 4, 16).to(dtype).transpose(1, 2), torch.randn(2, 5, 2, 16).to(dtype).transpose(1, 2)
    angles = torch.randn(2, 5, 16)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    with torch.no_grad():
        for got, expected in zip(native(q, k, tables=tables), module(q, k, tables=tables), strict=True):
            assert torch.equal(got, expected)


def test_a_rotation_of_pairs_by_the_first_half_of_a_table_is_recognized():
    form = form_of_rotation(modeling_glm.apply_rotary_pos_emb, torch.float32, torch.float32)
    assert form is not None and form.interleaved == 2


def test_a_rotation_that_parts_pairs_is_recognized():
    original = modeling_deepseek_v3.apply_rotary_pos_emb_interleave
    for dtype in DTYPES:
        form = form_of_rotation(original, dtype, dtype)
        assert form == RotaryForm(3, True)


def test_the_rotation_of_the_module_file_is_not_touched():
    stock = models.apply_rotary_pos_emb
    native = mixed(Rotating(), NativeRotary, rotary_form(Rotating(), torch.float32))
    q, tables = torch.randn(1, 2, 3, 8), (torch.randn(1, 3, 8), torch.randn(1, 3, 8))
    with torch.no_grad():
        native(q, q, tables=tables)
    assert models.apply_rotary_pos_emb is stock
    assert Rotating.forward.__globals__["apply_rotary_pos_emb"] is stock


def test_a_forward_without_a_rotation_has_no_form():
    assert rotary_form(nn.Linear(4, 4), torch.float32) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("act", "epilogue"),
    [(F.silu, "silu"), (nn.GELU(), "gelu"), (nn.GELU(approximate="tanh"), "gelu_tanh")],
    ids=["silu", "gelu", "gelu_tanh"],
)
def test_a_gated_mlp_is_recognized_and_close(act, epilogue, dtype):
    module = GatedMLP(40, 70, act, bias=True).to(dtype)
    sites, dropped = fused_sites(nn.ModuleList([module]), dtype, 64)
    assert [site.kind.name for site in sites] == ["mlp"]
    assert not dropped
    assert sites[0].state.epilogue == epilogue
    native = mixed(module, NativeGatedMLP, sites[0].state)
    x = torch.randn(2, 3, 40).to(dtype)
    with torch.no_grad():
        expected, got = module(x), native(x)
    eps = torch.finfo(dtype).eps
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize(
    "module", [ClampedMLP(8, 8), GatedMLP(8, 8, F.relu), GatedMLP(8, 8, nn.PReLU()), Attention(8)]
)
def test_other_modules_are_no_gated_mlp(module):
    assert GatedCall.of(module, 64) is None


@torch.no_grad()
def test_a_gate_that_is_called_second_is_seen():
    module = SwappedMLP(8, 8)
    sites, dropped = fused_sites(nn.Sequential(module), torch.float32, 64)
    assert ([site.state.gate for site in sites], dropped) == (["up_proj"], [])
    native, x = mixed(module, NativeGatedMLP, sites[0].state), torch.randn(3, 8)
    torch.testing.assert_close(native(x), module(x))


def test_gradients_hooks_and_autocast_bring_the_original_back():
    module = GatedMLP(16, 24)
    native = mixed(module, NativeGatedMLP, GatedCall.of(module, 64))
    module.load_state_dict(native.state_dict())
    x = torch.randn(3, 16)
    native(x).sum().backward()
    module(x).sum().backward()
    for ours, theirs in zip(native.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    seen = []
    native.gate_proj.register_forward_hook(lambda *args: seen.append(1))
    with torch.no_grad():
        assert torch.equal(native(x), module(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert native(x).dtype == torch.bfloat16
    assert len(seen) == 2


def test_new_weights_are_seen():
    module = GatedMLP(16, 24)
    native = mixed(module, NativeGatedMLP, GatedCall.of(module, 64))
    x = torch.randn(3, 16)
    with torch.no_grad():
        native(x)
        for change in (
            lambda: native.up_proj.weight.mul_(2),
            lambda: setattr(native.gate_proj.weight, "data", native.gate_proj.weight * 3),
            lambda: setattr(native, "up_proj", nn.Linear(16, 24, bias=False)),
        ):
            change()
            torch.testing.assert_close(native(x), GatedMLP.forward(native, x))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_reads_its_own_weights(clone):
    module = GatedMLP(16, 24)
    native = mixed(module, NativeGatedMLP, GatedCall.of(module, 64))
    x = torch.randn(3, 16)
    with torch.no_grad():
        expected = native(x)
        twin = clone(native)
        for parameter in native.parameters():
            parameter.zero_()
        assert torch.equal(twin(x), expected)
        assert type(twin).__name__ == "GatedMLP"
        assert isinstance(twin, NativeGatedMLP)
