"""Native calls for linear layers: which layers they take, and with how many rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_accel.fused import projections
from hf_accel.fused.projections import NativeLinear, ProjectionCall, is_bare_linear
from hf_accel.hardware import ISA_LEVELS, UNLIMITED
from hf_accel.kernels import cpu as kernels
from hf_accel.undo.journal import mixed_class
from hf_accel.undo.state import FUSED

from .models import Attention

FLOAT_ROWS = 16
pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))


def floating() -> Attention:
    module = Attention(64)
    for layer in module.children():
        layer.__class__ = mixed_class(NativeLinear, nn.Linear)
        vars(layer)[FUSED] = ProjectionCall(FLOAT_ROWS)
    return module


@torch.no_grad()
def test_many_rows_of_float_weights_go_to_torch():
    layer = floating().q_proj
    x = torch.randn(FLOAT_ROWS + 1, 64)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


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
        ("avx512_vnni", True, UNLIMITED),
        ("amx", True, UNLIMITED),
    ],
)
def test_half_precision_stays_native_where_torch_is_slow(
    level: str, in_torch: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projections, "level_in_use", lambda: ISA_LEVELS[level])
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: in_torch)
    assert projections.native_rows(torch.bfloat16) == rows
    by_inputs = projections.native_rows(torch.bfloat16, by_inputs=True)
    of_level = {"avx512_vnni_bf16": 64, "avx512_vnni": UNLIMITED}
    assert by_inputs == of_level.get(level, 4 if in_torch else UNLIMITED)
    assert projections.native_rows(torch.float16) == (128 if in_torch else UNLIMITED)
    singles = 256 if level == "avx512_vnni_bf16" else 128
    assert (projections.native_rows(torch.float32), projections.native_rows(torch.float64)) == (singles, 0)


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_tiles_multiply_any_number_of_rows() -> None:
    layer, x = nn.Linear(8, 4).bfloat16().requires_grad_(False), torch.ones(2, 8).bfloat16()
    for float_rows in (UNLIMITED, 16):
        call = projections.ProjectionCall(float_rows).ready((layer,), x)
        assert call is not None
        assert call.tile_rows == 1
