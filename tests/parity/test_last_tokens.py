"""Encoders of images that rotate the tokens of patches alone, and not those ahead of them (DINOv3)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DINOv3ViTConfig, DINOv3ViTModel
from transformers.models.dinov3_vit.modeling_dinov3_vit import apply_rotary_pos_emb, rotate_half

import hf_accel
from hf_accel.fused.encoder_rows import layout_of
from hf_accel.fused.partial_rotation import of_last_tokens, rotation_over_rows
from hf_accel.kernels import cpu as kernels

from .test_encoders import counted, module_by_module, undo_is_exact

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2, "image_size": 32,
    "patch_size": 8, "num_register_tokens": 3,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "plain": {}, "gated": {"use_gated_mlp": True, "hidden_act": "silu"}, "no registers": {"num_register_tokens": 0},
}  # fmt: skip
LAYERS = {"EncoderLayerCalls": 2, "layers": 2}


def build(form: str = "plain", dtype: torch.dtype = torch.float32, *, sharp: bool = True) -> Any:
    """Make a model. sharp: whether its scores are so large that tokens see few others, so that a rotation matters."""
    torch.manual_seed(0)
    model = DINOv3ViTModel(DINOv3ViTConfig(**SIZES | FORMS[form])).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1:
                tensor.copy_(torch.rand_like(tensor) * 0.4 + (0.8 if "weight" in name or "lambda" in name else 0))
            elif sharp and ("q_proj" in name or "k_proj" in name):
                tensor.normal_(0, 0.3)
    return model.to(dtype)


def images(count: int = 2, height: int = 32, width: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_outputs_are_stocks(form: str, dtype: torch.dtype) -> None:
    stock = build(form, dtype)
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    for sizes in ((1, 32, 32), (3, 48, 16), (2, 8, 8)):
        given = images(*sizes, dtype=dtype)
        with counted() as calls:
            found = ours(given)[0]
        assert +calls == LAYERS
        near = 2e-5 if dtype is torch.float32 else 0.1
        torch.testing.assert_close(found, stock(given)[0], rtol=near, atol=near)


@torch.no_grad()
def test_quantized_layers_are_those_of_their_modules() -> None:
    stock, given = build(sharp=False), images()
    ours = hf_accel.patch(copy.deepcopy(stock), weights="int8")
    with counted() as calls:
        found = ours(given)[0]
    assert +calls == LAYERS
    with module_by_module():
        expected = ours(given)[0]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)  # an activation may round to its neighbour
    cosine = torch.cosine_similarity(found.double(), stock(given)[0].double(), dim=-1)
    assert cosine.min() > 0.9995


@torch.no_grad()
def test_hidden_states_are_stocks() -> None:
    stock, given = build(), images()
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    found, expected = (model(given, output_hidden_states=True).hidden_states for model in (ours, stock))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_undo_is_exact() -> None:
    undo_is_exact(build(), {"pixel_values": images()})


@torch.no_grad()
def test_tables_of_another_form_are_stocks() -> None:
    stock = build()
    ours, states = hf_accel.patch(copy.deepcopy(stock), weights=None), torch.randn(2, 20, 64)
    cos, sin = stock.rope_embeddings(images())
    for tables, native in (((cos, sin), 1), ((cos[None], sin[None]), 0)):
        with counted() as calls:
            found, expected = (each.model.layer[0](states, position_embeddings=tables) for each in (ours, stock))
        assert calls["layers"] == native
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def rotates_all(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Move the tokens ahead as well."""
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return torch.cat([q[..., :1, :] * 2, q[..., 1:, :]], dim=-2), k


def rotates_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate as many tokens as the tables have from the first on."""
    count = len(cos)
    rotated = (x[..., :count, :] * cos + rotate_half(x[..., :count, :]) * sin for x in (q, k))
    first, second = (torch.cat([one, x[..., count:, :]], dim=-2) for one, x in zip(rotated, (q, k), strict=True))
    return first, second


def test_other_rotations_are_not_known() -> None:
    assert of_last_tokens(apply_rotary_pos_emb) is not None
    found = rotation_over_rows(apply_rotary_pos_emb, torch.float32, torch.float32)
    assert found is not None and found[1]
    for other in (rotates_all, rotates_first):
        assert of_last_tokens(other) is None and rotation_over_rows(other, torch.float32, torch.float32) is None
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as usual

    known = rotation_over_rows(usual, torch.float32, torch.float32)
    assert known is not None and not known[1]


def test_tables_of_the_last_tokens() -> None:
    layout = layout_of(None, 2, 5)
    assert layout is not None
    cos, sin = torch.randn(3, 4), torch.randn(3, 4)
    found = layout.tables((cos, sin), of_last=True)
    assert found is not None
    ahead = torch.ones(2, 4), torch.zeros(2, 4)
    for rows, one, first in zip(found, (cos, sin), ahead, strict=True):
        assert rows.view(2, 5, 4).equal(torch.cat([first, one]).expand(2, 5, 4))
    assert layout.tables((cos[None], sin[None]), of_last=True) is None
    assert layout.tables((torch.randn(6, 4), torch.randn(6, 4)), of_last=True) is None
