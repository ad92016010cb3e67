"""Encoders whose attention a trial knows: rotations of neighbouring numbers (RoFormer), and windows (Longformer)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_accel
from hf_accel.kernels import cpu as kernels
from hf_accel.recognition.known_modules import known_module

from .test_encoders import (
    NATIVE,
    batch,
    counted,
    made,
    module_by_module,
    same,
    same_attentions,
    same_by_modules,
    same_head,
    same_states,
    undo_is_exact,
)
from .test_gated_encoders import LAYERS, limit_rows

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 3,
    "max_position_embeddings": 120, "pad_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {"RoFormer": {"embedding_size": 32}, "Longformer": {"attention_window": 8}}
CALLS = {"RoFormer": NATIVE, "Longformer": LAYERS}
ATTENTION = {"RoFormer": "encoder.layer.0.attention.self", "Longformer": "encoder.layer.0.attention.self"}
INPUTS = {"padded": [11, 3, 7, 1], "none": [9, 9], "alone": [13], "one token": [1], "many": [70, 81, 9, 66, 40]}


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    return made(family, SIZES | FAMILIES[family] | changes, dtype)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_outputs_are_stocks(family: str, dtype: torch.dtype) -> None:
    stock, ours = build(family, dtype), hf_accel.patch(build(family, dtype), weights=None)
    for most in (None, 0):  # one native call a layer, and then operation by operation
        if most is not None:
            limit_rows(ours, most)
        for lengths in INPUTS.values():
            given = batch(lengths)
            with counted() as calls:
                found = ours(**given)
            assert calls == CALLS[family]
            same(found, stock(**given), given["attention_mask"], 2e-5 if dtype is torch.float32 else 0.06)


@pytest.mark.usefixtures("in_floats")
@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_quantized_layers_are_those_of_their_modules(family: str, weights: Any) -> None:
    ours, given = hf_accel.patch(build(family), weights=weights), batch([11, 3, 7, 1])
    with counted() as calls:
        found = ours(**given)
    assert calls == CALLS[family]
    with module_by_module():
        expected = ours(**given)
    same(found, expected, given["attention_mask"], 0.03)  # a level of an activation may round to its neighbour


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_hidden_states_and_heads(family: str) -> None:
    stock, given = build(family), batch([11, 3, 7])
    same_states(stock, hf_accel.patch(copy.deepcopy(stock), weights=None), given)
    kind: Any = getattr(transformers, f"{family}ForTokenClassification")
    torch.manual_seed(0)
    assert same_head(kind(stock.config).eval(), given) == CALLS[family]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_attentions_are_stocks(family: str) -> None:
    stock, ours, given = build(family), hf_accel.patch(build(family), weights=None), batch([11, 3, 7])
    with counted() as calls:
        same_attentions(stock, ours, given)
    assert not calls["layers"]


@torch.no_grad()
def test_tokens_that_see_all_others_are_stocks() -> None:
    stock, ours, given = build("Longformer"), hf_accel.patch(build("Longformer"), weights=None), batch([40, 9])
    wide = torch.zeros_like(given["input_ids"])
    wide[:, 0] = 1
    same_by_modules(stock, ours, given, global_attention_mask=wide)
    (line,) = [line for line in hf_accel.plan(stock, weights=None).lines if line.what == "other calls"]
    assert "tokens that see all others" in line.reason


@torch.no_grad()
def test_distances_count_padding_between_tokens() -> None:
    stock, ours = build("Longformer"), hf_accel.patch(build("Longformer"), weights=None)
    same_by_modules(stock, ours, batch([20, 20], holes=True))


@torch.no_grad()
def test_layers_of_several_windows() -> None:
    changes = {"attention_window": [4, 8, 16]}
    stock, ours = (build("Longformer", **copy.deepcopy(changes)) for _ in range(2))
    hf_accel.patch(ours, weights=None)
    given = batch([40, 9, 17])
    with counted() as calls:
        found = ours(**given)
    assert calls == LAYERS
    same(found, stock(**given), given["attention_mask"])


@torch.no_grad()
def test_rotated_values_and_decoders_are_stocks() -> None:
    for changes in ({"rotary_value": True}, {"is_decoder": True}):
        stock, ours = build("RoFormer", **changes), build("RoFormer", **changes)
        same_by_modules(stock, hf_accel.patch(ours, weights=None), batch([11, 3, 7]))


@torch.no_grad()
def test_positions_are_read_at_each_call() -> None:
    stock, ours, given = build("RoFormer"), hf_accel.patch(build("RoFormer"), weights=None), batch([11, 3, 7])
    ours(**given)
    for model in (stock, ours):
        model.get_submodule("encoder.embed_positions").weight.mul_(0.5)
    with counted() as calls:
        found = ours(**given)
    assert calls == NATIVE
    same(found, stock(**given), given["attention_mask"])


@pytest.mark.parametrize("family", FAMILIES)
def test_undo_is_exact(family: str) -> None:
    undo_is_exact(build(family), batch([6, 6, 4]))


class Other(nn.Module):
    """It has the parts of the module that is known, and does something else."""

    compute_bias = apply_rotary_position_embeddings = None

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        return hidden_states, None


@pytest.mark.parametrize("family", FAMILIES)
def test_code_that_only_has_the_parts_is_not_known(family: str) -> None:
    known: Any = build(family).get_submodule(ATTENTION[family])
    assert known_module(known) is not None
    other = copy.copy(known)
    other.__class__ = Other
    assert known_module(other) is None
