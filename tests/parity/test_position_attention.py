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
from hf_accel.fused.encoder_programme import EncoderProgramme
from hf_accel.kernels import cpu as kernels
from hf_accel.recognition import position_attention, trial

from .test_encoders import (
    batch,
    counted,
    made,
    module_by_module,
    same,
    same_attentions,
    same_head,
    same_states,
    undo_is_exact,
)
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
FIRST: dict[str, Any] = {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "type_vocab_size": 0,
    "hidden_act": "gelu",
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ESM": ("Esm", {"position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": True}),
    "DeBERTa-v3": ("DebertaV2", DEBERTA),
    "products of their own": ("DebertaV2", DEBERTA | {"share_att_key": False}),
    "no buckets": ("DebertaV2", DEBERTA | {"position_buckets": -1, "max_relative_positions": 20}),
    "a convolution": ("DebertaV2", DEBERTA | {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "DeBERTa": ("Deberta", FIRST),
    "few distances": ("Deberta", FIRST | {"max_relative_positions": 9}),
}
INPUTS = {
    "right": [11, 3, 7, 1], "none": [9, 9], "alone": [13], "one token": [1], "many": [70, 81, 9, 66, 40],
}  # fmt: skip
LAYERS = {"EncoderLayerCalls": 3, "layers": 3}


def build(family: str = "DeBERTa-v3", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    name, settings = FAMILIES[family]
    return made(name, copy.deepcopy(SIZES | settings | changes), dtype)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_outputs_are_stocks(family: str, dtype: torch.dtype) -> None:
    stock, ours = build(family, dtype), hf_accel.patch(build(family, dtype), weights=None)
    check_layouts(stock, ours, [batch(each) for each in INPUTS.values()], 2e-5 if dtype is torch.float32 else 0.06)


@pytest.mark.usefixtures("in_floats")
@pytest.mark.covering(1)
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


@pytest.mark.parametrize("family", ["ESM", "DeBERTa-v3", "DeBERTa"])
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


@pytest.mark.parametrize("family", ["ESM", "DeBERTa-v3", "DeBERTa"])
@torch.no_grad()
def test_hidden_states_and_heads(family: str) -> None:
    stock, given = build(family), batch([11, 3, 7])
    same_states(stock, hf_accel.patch(copy.deepcopy(stock), weights=None), given)
    for head in ("SequenceClassification", "MaskedLM", "TokenClassification"):
        kind: Any = getattr(transformers, f"{FAMILIES[family][0]}For{head}")
        torch.manual_seed(0)
        assert same_head(kind(stock.config).eval(), given) == LAYERS


@pytest.mark.parametrize("family", ["DeBERTa-v3", "DeBERTa"])
@torch.no_grad()
def test_attentions_are_stocks(family: str) -> None:
    stock, ours, given = build(family), hf_accel.patch(build(family), weights=None), batch([11, 3, 7])
    with counted() as calls:
        same_attentions(stock, ours, given)
    assert not calls["layers"]


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


def change_queries(layer: Any) -> None:
    layer.attention.self.q_bias.data.mul_(-3)


def change_values(layer: Any) -> None:
    layer.attention.self.v_bias = nn.Parameter(layer.attention.self.v_bias.detach().flip(0), requires_grad=False)


def change_joint(layer: Any) -> None:
    layer.attention.self.in_proj.weight.data = layer.attention.self.in_proj.weight.data.flip(0)


def change_first_span(layer: Any) -> None:
    layer.attention.self.max_relative_positions = 4


def change_norm(layer: Any) -> None:
    layer.output.LayerNorm.variance_epsilon = 0.5


def talk(layer: Any) -> None:
    layer.attention.self.head_logits_proj = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.attention.self.head_logits_proj.weight, 0.3)


def change_kind(layer: Any) -> None:
    layer.attention.self.pos_att_type = ["c2p"]


def change_kind_in_place(layer: Any) -> None:
    layer.attention.self.pos_att_type.remove("p2c")


def hook(layer: Any) -> None:
    layer.attention.self.register_forward_hook(lambda module, args, output: (output[0] * 2, *output[1:]))


OF_BOTH = (change_kind, change_kind_in_place, hook)
OF_FIRST = (change_queries, change_values, change_joint, change_first_span, change_norm, talk)


@pytest.mark.parametrize(
    ("family", "change"),
    [("DeBERTa-v3", each) for each in (change_span, change_key, change_key_in_place, *OF_BOTH)]
    + [("DeBERTa", each) for each in (*OF_FIRST, *OF_BOTH)],
)
@torch.no_grad()
def test_changes_between_calls_are_seen(family: str, change: Any) -> None:
    stock, ours, given = build(family), hf_accel.patch(build(family), weights=None), batch([6, 6, 4])
    before = ours(**given).last_hidden_state
    for model in (stock, ours):
        change(model.encoder.layer[1])
    for _ in range(2):
        found = ours(**given)
        same(found, stock(**given), given["attention_mask"])
        assert not torch.equal(found.last_hidden_state, before)


@pytest.mark.parametrize("family", ["DeBERTa-v3", "DeBERTa", "few distances"])
@torch.no_grad()
def test_positions_that_are_given(family: str) -> None:
    """Those that are no odd function of the distance are left to the model, and masks that differ by query."""
    stock, given = build(family), batch([6, 6])
    layer: Any = stock.encoder.layer[0]
    states, table = stock.embeddings(given["input_ids"]), stock.encoder.get_rel_embedding()
    ours: Any = hf_accel.patch(copy.deepcopy(stock), weights=None).encoder.layer[0]
    places = torch.arange(6)
    distance = places[:, None] - places
    ones = torch.ones(2, 1, 6, 6)
    cases = (
        (distance, ones, 1),
        (distance * 2, ones, 1),
        (distance * 3, ones, 1),
        (distance + 1, ones, 0),
        (distance * places, ones, 0),
    )
    for positions, mask, native in (*cases, (distance, ones.tril(), 0)):
        arguments = {"relative_pos": positions[None], "rel_embeddings": table}
        with counted() as calls:
            found = ours(states, mask, **arguments)[0]
        assert calls["layers"] == native
        torch.testing.assert_close(found, layer(states, mask, **arguments)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["ESM", "DeBERTa-v3", "DeBERTa"])
def test_undo_is_exact(family: str) -> None:
    undo_is_exact(build(family), batch([6, 6, 4]))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_says_so(family: str) -> None:
    lines = {line.what: line for line in hf_accel.plan(build(family), weights=None).lines if line.topic == "fused"}
    assert lines["3 encoder layers"].choice == "one native call each"


@pytest.mark.parametrize("weights", [None, "int8"])
@torch.no_grad()
def test_operations_one_by_one(weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of many rows are torch's."""
    ours, given = hf_accel.patch(build("DeBERTa"), weights=weights), batch([11, 3, 7])
    expected = ours(**given)
    monkeypatch.setattr(EncoderProgramme, "max_tokens", property(lambda programme: 1, lambda *args: None), False)
    with counted() as calls:
        found = ours(**given)
    assert calls == LAYERS
    same(found, expected, given["attention_mask"])


class Other(nn.Module):
    """It is named as the module that is known, and does something else."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **given: Any) -> Any:
        return hidden_states, None


@pytest.mark.parametrize("family", ["DeBERTa-v3", "DeBERTa"])
def test_code_that_only_has_the_name_is_not_known(family: str) -> None:
    known: Any = build(family).get_submodule("encoder.layer.0.attention.self")
    assert position_attention.position_attention(known) is not None
    other = copy.copy(known)
    other.__class__ = type("DisentangledSelfAttention", (Other,), {})
    assert position_attention.position_attention(other) is None


class ItsLayerNorm(nn.Module):
    """Its code computes what the subclasses say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))
        self.variance_epsilon = 1e-7


class FromMeanLayerNorm(ItsLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt() * self.weight + self.bias


class OutsideLayerNorm(ItsLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon) * self.weight + self.bias


class NoMeanLayerNorm(ItsLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt() * self.weight + self.bias


class UnbiasedLayerNorm(ItsLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-7).sqrt() * self.weight + self.bias


@pytest.mark.parametrize(
    ("kind", "known"),
    [(FromMeanLayerNorm, True), (OutsideLayerNorm, False), (NoMeanLayerNorm, False), (UnbiasedLayerNorm, False)],
)
def test_code_that_computes_a_layer_norm(kind: type[ItsLayerNorm], known: bool) -> None:
    module = kind()
    assert trial.is_layer_norm(module) is known
    module.table = torch.ones(16)  # type: ignore[assignment]
    assert not trial.is_layer_norm(module)  # the trial would not see it change
