"""Encoders whose layers rotate queries and keys, see a window on both sides, and multiply halves of a product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import hf_accel
from hf_accel.kernels import cpu as kernels
from tests.families.models import enliven

from .test_encoders import batch, counted, module_by_module, same, same_head, same_states_and_attentions, undo_is_exact

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 4,
    "local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
    "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip
LENGTHS = {
    "within the window": [5, 3, 1], "one more than the window": [6, 4], "padded": [30, 7, 18, 1], "none": [17, 17],
    "alone": [23], "many rows": [70, 66, 5],
}  # fmt: skip
LAYERS = {"EncoderLayerCalls": 4, "layers": 4}


def build(dtype: torch.dtype = torch.float32, kind: str = "ModernBertModel", **changes: Any) -> PreTrainedModel:
    config = transformers.ModernBertConfig(**SIZES | changes)
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, kind)(config)
    enliven(model)
    return model.to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_outputs_are_stocks(dtype: torch.dtype) -> None:
    stock, ours = build(dtype), hf_accel.patch(build(dtype), weights=None)
    tolerance = 2e-5 if dtype is torch.float32 else 0.04
    for given in map(batch, LENGTHS.values()):
        with counted() as calls:
            found = ours(**given)
        assert calls == LAYERS
        same(found, stock(**given), given["attention_mask"], tolerance)
        bare = {"input_ids": given["input_ids"]}
        same(ours(**bare), stock(**bare), torch.ones_like(bare["input_ids"]), tolerance)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_bias": True, "mlp_bias": True, "attention_bias": True}, {"hidden_activation": "silu"},
        {"global_attn_every_n_layers": 1}, {"local_attention": 2}, {"hidden_activation": "gelu_new"},
    ],
    ids=str,
)  # fmt: skip
@torch.no_grad()
def test_other_configs(changes: dict[str, Any]) -> None:
    stock, ours, given = build(**changes), hf_accel.patch(build(**changes), weights=None), batch([30, 7, 18])
    with counted() as calls:
        found = ours(**given)
    assert calls == LAYERS
    same(found, stock(**given), given["attention_mask"])


@torch.no_grad()
def test_windows_matter_here() -> None:
    """The other tests would notice a layer that saw all tokens."""
    given = batch([30, 7, 18])
    narrow, wide = build(), build(local_attention=100)
    assert not torch.allclose(narrow(**given).last_hidden_state, wide(**given).last_hidden_state, atol=1e-2)


@pytest.mark.usefixtures("in_floats")
@pytest.mark.parametrize("weights", ["int8", "int4"])
@torch.no_grad()
def test_quantized_layers_are_those_of_their_modules(weights: str) -> None:
    config: Any = weights if weights == "int8" else {"bits": 4, "group_size": 32}
    ours, given = hf_accel.patch(build(), weights=config), batch([30, 7, 18, 1])
    with counted() as calls:
        found = ours(**given)
    assert calls == LAYERS
    with module_by_module():
        expected = ours(**given)
    same(found, expected, given["attention_mask"], 0.02)


@torch.no_grad()
def test_positions_may_be_given() -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([12, 5])
    for rows in (1, 2):
        given["position_ids"] = torch.arange(24).view(2, 12).flip(0, 1)[:rows]
        with counted() as calls:
            same(ours(**given), stock(**given), given["attention_mask"])
        assert calls == LAYERS


@torch.no_grad()
def test_padding_within_a_row_counts_in_distances() -> None:
    """Layers with a window run their own code for it; the others leave it out."""
    stock, ours = build(), hf_accel.patch(build(), weights=None)
    holes, left = batch([30, 7, 18], holes=True), batch([30, 30])
    left["attention_mask"][0, :4] = 0
    with counted() as calls:
        same(ours(**holes), stock(**holes), holes["attention_mask"])
    assert calls["layers"] == 2
    with counted() as calls:
        same(ours(**left), stock(**left), left["attention_mask"])
    assert calls["layers"] == 0


@torch.no_grad()
def test_masks_of_users() -> None:
    """A mask that shows a windowed layer more or less than its window is stock's."""
    stock, ours = build(), hf_accel.patch(build(), weights=None)
    ids, whole = batch([20, 20])["input_ids"], torch.ones(2, 1, 20, 20, dtype=torch.bool)
    places = torch.arange(20)
    near = ((places[:, None] - places).abs() <= 4).expand(2, 1, 20, 20)
    for sliding, native in ((near, 4), (whole, 2), (near.tril(), 2), (near & (places != 3), 2)):
        given = {"full_attention": whole, "sliding_attention": sliding}
        with counted() as calls:
            same(ours(ids, attention_mask=given), stock(ids, attention_mask=given), torch.ones(2, 20))
        assert calls["layers"] == native


@torch.no_grad()
def test_hidden_states_and_attentions() -> None:
    same_states_and_attentions(build(), hf_accel.patch(build(), weights=None), batch([30, 7, 18]))


@pytest.mark.parametrize("kind", ["MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@torch.no_grad()
def test_heads(kind: str, pooling: str) -> None:
    stock = build(kind=f"ModernBertFor{kind}", classifier_pooling=pooling)
    assert same_head(stock, batch([12, 5])) == LAYERS


@torch.no_grad()
def test_a_window_that_is_changed_is_seen() -> None:
    stock, ours, given = build(), hf_accel.patch(build(), weights=None), batch([20, 9])
    before = ours(**given).last_hidden_state
    for model in (stock, ours):
        model.config.sliding_window = 2
        for layer in model.layers:
            layer.attn.sliding_window = layer.attn.sliding_window and 3
    with counted() as calls:
        found = ours(**given)
    assert calls == LAYERS and not torch.equal(found.last_hidden_state, before)
    same(found, stock(**given), given["attention_mask"])


@torch.no_grad()
def test_tables_of_another_form_are_the_models() -> None:
    """Half of the numbers of a head are rotated by none of our layers."""
    ours, seen = hf_accel.patch(build(), weights=None), list[Tensor]()
    layer, x = ours.layers[0], torch.randn(2, 4, 64)
    table = torch.randn(1, 4, 16)
    with counted() as calls:
        seen.append(layer(x, position_embeddings=(table.cos(), table.sin())))
        for tables in ((table[:, :3].cos(), table[:, :3].sin()), (table[..., :8].cos(), table[..., :8].sin())):
            with pytest.raises(RuntimeError, match="size"):  # stock's code refuses them
                layer(x, position_embeddings=tables)
    assert calls["layers"] == 1 and seen[0].isfinite().all()


def test_undo_is_exact() -> None:
    undo_is_exact(build(), batch([12, 5]))


def test_the_plan_says_so() -> None:
    lines = {line.what: line for line in hf_accel.plan(build(), weights=None).lines if line.topic == "fused"}
    assert lines["4 encoder layers"].choice == "one native call each"
