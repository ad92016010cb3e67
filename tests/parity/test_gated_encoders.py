"""Encoders whose layers have RMSNorms, gated MLPs, and fewer heads of keys than of queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import hf_accel
from hf_accel.fused.hf.encoder_calls import EncoderLayerCalls
from hf_accel.kernels import cpu as kernels
from hf_accel.undo.state import FUSED

from .test_encoders import batch, counted, made, module_by_module, same, undo_is_exact

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 3,
    "max_position_embeddings": 80, "pad_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "NomicBert": {}, "EuroBert": {"num_key_value_heads": 2}, "Gte": {}, "JinaEmbeddingsV3": {},
}  # fmt: skip
KNOWN = [family for family in FAMILIES if hasattr(transformers, f"{family}Config")]  # by this transformers
LENGTHS = {"padded": [11, 3, 7, 1], "none": [9, 9], "alone": [13], "one token": [1], "many rows": [70, 66, 5]}
LAYERS = {"EncoderLayerCalls": 3, "layers": 3}


def build(family: str = "EuroBert", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    return made(family, SIZES | FAMILIES[family] | changes, dtype)


def limit_rows(model: nn.Module, most: int) -> None:
    """Let more rows than these be computed operation by operation."""
    for module in model.modules():
        calls = vars(module).get(FUSED)
        for known in calls._known.values() if isinstance(calls, EncoderLayerCalls) else ():
            known.programme.max_tokens = most  # type: ignore[attr-defined]


def check_layouts(stock: Any, ours: Any, layouts: Sequence[dict[str, Any]], tolerance: float) -> None:
    """Require stock's outputs of each batch, by one native call a layer and then operation by operation."""
    for most in (None, 0):
        if most is not None:
            limit_rows(ours, most)
        for given in layouts:
            with counted() as calls:
                found = ours(**given)
            assert calls == LAYERS
            same(found, stock(**given), given["attention_mask"], tolerance)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", KNOWN)
@torch.no_grad()
def test_outputs_are_stocks(family: str, dtype: torch.dtype) -> None:
    stock, ours = build(family, dtype), hf_accel.patch(build(family, dtype), weights=None)
    check_layouts(stock, ours, [batch(each) for each in LENGTHS.values()], 2e-5 if dtype is torch.float32 else 0.04)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"attention_bias": True, "mlp_bias": True},
        {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}, {"rms_norm_eps": 0.3},
    ],
    ids=str,
)  # fmt: skip
@torch.no_grad()
def test_other_configs(changes: dict[str, Any]) -> None:
    stock, ours, given = build(**changes), hf_accel.patch(build(**changes), weights=None), batch([11, 3, 7])
    expected = stock(**given)
    for most in (None, 0):
        if most is not None:
            limit_rows(ours, most)
        with counted() as calls:
            found = ours(**given)
        assert calls == LAYERS
        same(found, expected, given["attention_mask"])


class TwoProducts(nn.Module):
    """down(up(x) + gate(x)), of the parts of an MLP."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(x) + self.gate(x))
        return found


@torch.no_grad()
def test_a_sum_of_two_products_of_one_tensor() -> None:
    stock, ours, given = build(), build(), batch([11, 3, 7])
    for model in (stock, ours):
        for layer in model.layers:
            layer.mlp = TwoProducts(layer.mlp)
    hf_accel.patch(ours, weights=None)
    with counted() as calls:
        found = ours(**given)
    assert calls == LAYERS
    same(found, stock(**given), given["attention_mask"])


@pytest.mark.usefixtures("in_floats")
@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}], ids=str)
@pytest.mark.parametrize("family", KNOWN)
@torch.no_grad()
def test_quantized_layers_are_those_of_their_modules(family: str, weights: Any) -> None:
    ours, given = hf_accel.patch(build(family), weights=weights), batch([11, 3, 7, 1])
    with counted() as calls:
        found = ours(**given)
    assert calls == LAYERS
    with module_by_module():
        expected = ours(**given)
    same(found, expected, given["attention_mask"], 0.02)  # a level of an activation may round to its neighbour


def change_weight(layer: Any) -> None:
    layer.input_layernorm.weight = nn.Parameter(torch.linspace(0.5, 2, 64))


def change_in_place(layer: Any) -> None:
    layer.input_layernorm.weight.mul_(1.5)


def change_eps(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = 0.5


def change_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.Tanh()


def change_norm(layer: Any) -> None:
    layer.post_attention_layernorm = nn.Identity()


def change_up(layer: Any) -> None:
    layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.flip(0)


def prune(layer: Any) -> None:
    nn.utils.prune.l1_unstructured(layer.mlp.gate_proj, "weight", 0.5)


@pytest.mark.parametrize(
    "change", [change_weight, change_in_place, change_eps, change_activation, change_norm, change_up, prune]
)
@torch.no_grad()
def test_changes_between_calls_are_seen(change: Any) -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([6, 6, 4])
    before = ours(**given).last_hidden_state
    for model in (stock, ours):
        change(model.layers[1])
    for _ in range(2):
        found = ours(**given)
        same(found, stock(**given), given["attention_mask"])
        assert not torch.equal(found.last_hidden_state, before)


@pytest.mark.parametrize(
    ("name", "native"),
    [("layers.1.input_layernorm", 2), ("layers.1.mlp", 2), ("layers.1.mlp.up_proj", 2), ("layers.1.self_attn", 2),
     ("layers.1", 3), ("norm", 3)],
)  # fmt: skip
@torch.no_grad()
def test_hooks_see_what_stock_shows(name: str, native: int) -> None:
    stock, ours, given, seen = build(), hf_accel.patch(build(), weights=None), batch([11, 3, 7]), list[int]()
    ours(**given)
    ours.get_submodule(name).register_forward_hook(lambda module, args, output: seen.append(1))
    with counted() as calls:
        same(ours(**given), stock(**given), given["attention_mask"])
    assert calls["layers"] == native and seen == [1]


def test_undo_is_exact() -> None:
    undo_is_exact(build(), batch([12, 5]))


@pytest.mark.parametrize("family", KNOWN)
def test_the_plan_says_so(family: str) -> None:
    lines = {line.what: line for line in hf_accel.plan(build(family), weights=None).lines if line.topic == "fused"}
    assert lines["3 encoder layers"].choice == "one native call each"


def odd_rotation(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return q * cos[:, None] + q.flip(-1) * sin[:, None], k * cos[:, None] + k.flip(-1) * sin[:, None]


@torch.no_grad()
def test_the_plan_of_rotations_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    module = transformers.models.eurobert.modeling_eurobert
    monkeypatch.setattr(module, "apply_rotary_pos_emb", odd_rotation)
    stock, given = build(), batch([6, 4])
    lines = [line for line in hf_accel.plan(build(), weights=None).lines if line.what == "3 encoder layers"]
    assert [(line.choice, line.reason) for line in lines] == [
        (
            "module by module",
            "others have replaced transformers.models.eurobert.modeling_eurobert.apply_rotary_pos_emb",
        )
    ]
    same(hf_accel.patch(build(), weights=None)(**given), stock(**given), given["attention_mask"])


def test_the_plan_of_rotations_of_parts_of_heads() -> None:
    model = build()
    model.config.rope_parameters["partial_rotary_factor"] = 0.5
    lines = [line for line in hf_accel.plan(model, weights=None).lines if line.what == "3 encoder layers"]
    assert [line.reason for line in lines] == ["its rotation leaves numbers as they are"]
