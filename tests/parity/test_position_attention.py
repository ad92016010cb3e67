"""Encoders that see positions by rotations of scaled queries (ESM), or by products of them with tokens (DeBERTa)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_accel
from hf_accel.fused import encoder_rows
from hf_accel.kernels import cpu as kernels
from hf_accel.recognition import position_attention

from .test_encoders import batch, counted, made, module_by_module, same, same_head, undo_is_exact
from .test_gated_encoders import check_layouts

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 3,
    "max_position_embeddings": 200, "pad_token_id": 1,
}  # fmt: skip
DEBERTA: dict[str, Any] = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ESM": ("Esm", {"position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": True}),
    "DeBERTa-v3": ("DebertaV2", DEBERTA),
    "products of their own": ("DebertaV2", DEBERTA | {"share_att_key": False}),
    "no buckets": ("DebertaV2", DEBERTA | {"position_buckets": -1, "max_relative_positions": 20}),
    "a convolution": ("DebertaV2", DEBERTA | {"conv_kernel_size": 3, "conv_act": "gelu"}),
}
INPUTS = {
    "right": [11, 3, 7, 1], "none": [9, 9], "alone": [13], "one token": [1], "many": [70, 81, 9, 66, 40],
}  # fmt: skip
LAYERS = {"EncoderLayerCalls": 3, "layers": 3}


def build(family: str = "DeBERTa-v3", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    name, settings = FAMILIES[family]
    return made(name, copy.deepcopy(SIZES | settings | changes), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_outputs_are_stocks(family: str, dtype: torch.dtype) -> None:
    stock, ours = build(family, dtype), hf_accel.patch(build(family, dtype), weights=None)
    check_layouts(stock, ours, [batch(each) for each in INPUTS.values()], 2e-5 if dtype is torch.float32 else 0.06)


@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_quantized_layers_are_those_of_their_modules(family: str, weights: Any) -> None:
    ours, given = hf_accel.patch(build(family), weights=weights), batch([11, 3, 7, 1])
    with counted() as calls:
        found = ours(**given)
    assert calls == LAYERS
    with module_by_module():
        expected = ours(**given)
    same(found, expected, given["attention_mask"], 0.03)  # a level of an activation may round to its neighbour


@pytest.mark.parametrize("family", ["ESM", "DeBERTa-v3"])
@torch.no_grad()
def test_a_sequence_has_its_bits_in_any_batch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, lengths = hf_accel.patch(build(family), weights="int8"), [11, 3, 7, 1, 40]
    given = batch(lengths)
    together = ours(**given).last_hidden_state
    monkeypatch.setattr(encoder_rows, "CALL_TOKENS", 12)
    assert torch.equal(ours(**given).last_hidden_state, together)
    for row, length in enumerate(lengths):
        alone = ours(**{name: tensor[row : row + 1, :length] for name, tensor in given.items()}).last_hidden_state
        assert torch.equal(alone[0], together[row, :length])


@pytest.mark.parametrize("family", ["ESM", "DeBERTa-v3"])
@torch.no_grad()
def test_hidden_states_and_heads(family: str) -> None:
    stock, given = build(family), batch([11, 3, 7])
    ours, real = hf_accel.patch(copy.deepcopy(stock), weights=None), given["attention_mask"].bool()
    found, expected = (model(**given, output_hidden_states=True) for model in (ours, stock))
    assert len(found.hidden_states) == len(expected.hidden_states) == 4
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one[real], other[real], rtol=1e-4, atol=2e-5)
    for head in ("SequenceClassification", "MaskedLM", "TokenClassification"):
        kind: Any = getattr(transformers, f"{FAMILIES[family][0]}For{head}")
        torch.manual_seed(0)
        assert same_head(kind(stock.config).eval(), given) == LAYERS


@torch.no_grad()
def test_attentions_are_stocks() -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([11, 3, 7])
    with counted() as calls:
        found, expected = (model(**given, output_attentions=True) for model in (ours, stock))
    assert not calls["layers"]
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["left", "holes"])
@torch.no_grad()
def test_other_masks_are_stocks(mask: str) -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([6, 6, 4])
    real = given["attention_mask"]
    if mask == "left":
        real[1, :3] = 0
    else:
        real[1, 2:4] = 0
    with counted() as calls:
        found = ours(**given)
    assert not calls["layers"]
    same(found, stock(**given), torch.ones_like(real))


def change_span(layer: Any) -> None:
    layer.attention.self.pos_ebd_size = 4


def change_key(layer: Any) -> None:
    layer.attention.self.key_proj.weight.data = layer.attention.self.key_proj.weight.data.flip(0)


def change_key_in_place(layer: Any) -> None:
    layer.attention.self.key_proj.weight.data.mul_(1.5)


def change_kind(layer: Any) -> None:
    layer.attention.self.pos_att_type = ["c2p"]


def change_kind_in_place(layer: Any) -> None:
    layer.attention.self.pos_att_type.remove("p2c")


def hook(layer: Any) -> None:
    layer.attention.self.register_forward_hook(lambda module, args, output: (output[0] * 2, *output[1:]))


@pytest.mark.parametrize(
    "change", [change_span, change_key, change_key_in_place, change_kind, change_kind_in_place, hook]
)
@torch.no_grad()
def test_changes_between_calls_are_seen(change: Any) -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([6, 6, 4])
    before = ours(**given).last_hidden_state
    for model in (stock, ours):
        change(model.encoder.layer[1])
    for _ in range(2):
        found = ours(**given)
        same(found, stock(**given), given["attention_mask"])
        assert not torch.equal(found.last_hidden_state, before)


@torch.no_grad()
def test_positions_that_are_given() -> None:
    """Those that are no odd function of the distance are left to the model, and masks that differ by query."""
    stock, given = build(), batch([6, 6])
    layer: Any = stock.encoder.layer[0]
    states, table = stock.embeddings(given["input_ids"]), stock.encoder.get_rel_embedding()
    ours: Any = hf_accel.patch(copy.deepcopy(stock), weights=None).encoder.layer[0]
    places = torch.arange(6)
    distance = places[:, None] - places
    ones = torch.ones(2, 1, 6, 6)
    cases = ((distance, ones, 1), (distance * 2, ones, 1), (distance + 1, ones, 0), (distance * places, ones, 0))
    for positions, mask, native in (*cases, (distance, ones.tril(), 0)):
        arguments = {"relative_pos": positions[None], "rel_embeddings": table}
        with counted() as calls:
            found = ours(states, mask, **arguments)[0]
        assert calls["layers"] == native
        torch.testing.assert_close(found, layer(states, mask, **arguments)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["ESM", "DeBERTa-v3"])
def test_undo_is_exact(family: str) -> None:
    undo_is_exact(build(family), batch([6, 6, 4]))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_says_so(family: str) -> None:
    lines = {line.what: line for line in hf_accel.plan(build(family), weights=None).lines if line.topic == "fused"}
    assert lines["3 encoder layers"].choice == "one native call each"


class Other(nn.Module):
    """It is named as the module that is known, and does something else."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **given: Any) -> Any:
        return hidden_states, None


def test_code_that_only_has_the_name_is_not_known() -> None:
    known: Any = build().get_submodule("encoder.layer.0.attention.self")
    assert position_attention.position_attention(known) is not None
    other = copy.copy(known)
    other.__class__ = type("DisentangledSelfAttention", (Other,), {})
    assert position_attention.position_attention(other) is None
