"""Encoders whose attention adds a bias of positions to scores: tokens as stock computes them, padding left out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_accel
from hf_accel.fused import encoder_rows
from hf_accel.fused.encoder_programme import EncoderProgramme
from hf_accel.kernels import cpu as kernels
from hf_accel.undo.state import FUSED
from tests.families.models import enliven

from .test_encoders import batch, counted, module_by_module, same

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 3,
    "max_position_embeddings": 200,
}  # fmt: skip
INPUTS = {
    "right": [11, 3, 7, 1], "none": [9, 9], "alone": [13], "one token": [1], "many": [150, 180, 9, 160, 170],
}  # fmt: skip


T5: dict[str, Any] = {
    "vocab_size": 61, "d_model": 64, "d_kv": 12, "num_heads": 4, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 1,
    "decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
GATED = {"feed_forward_proj": "gated-gelu"}
FAMILIES = {"T5": ("T5", {}), "gated T5": ("T5", GATED), "MT5": ("MT5", GATED), "UMT5": ("UMT5", GATED)}


def build(dtype: torch.dtype = torch.float32, family: str = "MPNet", kind: str = "EncoderModel") -> Any:
    torch.manual_seed(0)
    if family == "MPNet":
        model: Any = transformers.MPNetModel(transformers.MPNetConfig(**SIZES))
    else:
        name, extra = FAMILIES[family]
        config = getattr(transformers, f"{name}Config")(**T5, **extra)
        model = getattr(transformers, f"{name}{kind}")(config)
    enliven(model)
    for name, module in model.named_modules():
        if name.endswith("relative_attention_bias"):
            module.weight.data.normal_(0, 2)  # as much as the scores
    return model.to(dtype).eval()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["MPNet", *FAMILIES])
@torch.no_grad()
def test_outputs_are_stocks(family: str, dtype: torch.dtype) -> None:
    stock = build(dtype, family)
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    for given in map(batch, INPUTS.values()):
        with counted() as calls:
            found = ours(**given)
        assert calls["layers"] == 3
        same(found, stock(**given), given["attention_mask"], 2e-5 if dtype is torch.float32 else 0.06)
        if not stock.config.is_encoder_decoder:  # UMT5's encoder says so alone too
            assert not found.last_hidden_state[given["attention_mask"] == 0].any()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_before_a_decoder_padding_has_stocks_numbers(family: str) -> None:
    stock, given = build(family=family, kind="ForConditionalGeneration"), batch([11, 3, 7, 1])
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    prompt = {"decoder_input_ids": torch.tensor([[0, 9]] * 4)}
    with counted() as calls:
        found = ours(**given, **prompt)
    assert calls["layers"] == 3
    expected = stock(**given, **prompt)
    same({"last_hidden_state": found.encoder_last_hidden_state}, {"last_hidden_state": expected[2]}, torch.ones(4, 11))
    same({"last_hidden_state": found.logits}, {"last_hidden_state": expected.logits}, torch.ones(4, 2))
    for options in ({"do_sample": False}, {"num_beams": 3}):
        asked = {"max_new_tokens": 8, **options}
        assert torch.equal(ours.generate(**given, **asked), stock.generate(**given, **asked))


@pytest.mark.parametrize("change", ["bias", "method", "hook", "layer", "weight"])
@torch.no_grad()
def test_changes_of_t5_are_seen(change: str) -> None:
    stock, given = build(family="gated T5"), batch([11, 3, 7])
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    before = ours(**given).last_hidden_state
    for model in (stock, ours):
        block = model.encoder.block[0]
        if change == "bias":
            block.layer[0].SelfAttention.relative_attention_bias.weight.mul_(-1)
        elif change == "method":
            attention = block.layer[0].SelfAttention
            compute = attention.compute_bias
            attention.compute_bias = lambda *args, compute=compute, **kwargs: compute(*args, **kwargs) * 2
        elif change == "hook":
            embedding = block.layer[0].SelfAttention.relative_attention_bias
            embedding.register_forward_hook(lambda module, args, out: out + torch.arange(4))
            embedding.register_forward_hook(lambda module, args, out: out * 2)
        elif change == "layer":
            block.layer[1] = copy.deepcopy(model.encoder.block[2].layer[1])
        else:
            block.layer[1].DenseReluDense.wo.weight.data = torch.zeros(64, 96)
    found = ours(**given)
    assert not torch.allclose(found.last_hidden_state, before, atol=1e-3)
    same(found, stock(**given), given["attention_mask"])


@pytest.mark.usefixtures("in_floats")
@pytest.mark.parametrize("weights", ["int8", {"bits": 4, "group_size": 32}], ids=str)
@torch.no_grad()
def test_quantized_layers_are_those_of_their_modules(weights: Any) -> None:
    ours, given = hf_accel.patch(build(), weights=weights), batch([11, 3, 7, 1])
    with counted() as calls:
        found = ours(**given)
    assert calls["layers"] == 3
    with module_by_module():
        expected = ours(**given)
    same(found, expected, given["attention_mask"], 0.03)  # a level of an activation may round to its neighbour


@torch.no_grad()
def test_a_sequence_has_its_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, lengths = hf_accel.patch(build(), weights="int8"), [11, 3, 7, 1]
    given = batch(lengths)
    together = ours(**given).last_hidden_state
    for row, length in enumerate(lengths):
        alone = ours(**{name: tensor[row : row + 1, :length] for name, tensor in given.items()}).last_hidden_state
        assert torch.equal(alone[0], together[row, :length])
    monkeypatch.setattr(encoder_rows, "CALL_TOKENS", 5)
    assert torch.equal(ours(**given).last_hidden_state, together)


@torch.no_grad()
def test_padding_elsewhere_is_stocks() -> None:
    """A token's place among the tokens is then another one than in its row."""
    stock, given = build(), batch([11, 3, 7], holes=True)
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    with counted() as calls:
        found = ours(**given)
    assert not calls["layers"]
    same(found, stock(**given), torch.ones(3, 11))


@torch.no_grad()
def test_what_is_asked_for() -> None:
    stock, given = build(), batch([11, 3, 7])
    ours, real = hf_accel.patch(copy.deepcopy(stock), weights=None), given["attention_mask"].bool()
    found, expected = ours(**given, output_hidden_states=True), stock(**given, output_hidden_states=True)
    assert len(found.hidden_states) == len(expected.hidden_states) == 4
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one[real], other[real], rtol=1e-4, atol=2e-5 * float(other.abs().max()))
    with counted() as calls:
        found, expected = ours(**given, output_attentions=True), stock(**given, output_attentions=True)
    assert not calls["layers"] and len(found.attentions) == 3
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def layer_and_input() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    stock = build()
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    return stock.encoder.layer[1], ours.encoder.layer[1], torch.randn(2, 6, 64), torch.randn(2, 4, 6, 6)


@torch.no_grad()
def test_biases_and_masks_that_are_not_taken_are_stocks() -> None:
    stock, ours, x, bias = layer_and_input()
    same_bias, mask = bias[:1].expand(2, -1, -1, -1), torch.zeros(2, 1, 1, 6)
    native: list[tuple[Any, ...]] = [(mask, same_bias), (mask, bias[:1]), (None, same_bias), (mask, bias[:1].double())]
    by_rows, seen = (mask, bias), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()[:, None, None]
    others: list[tuple[Any, ...]] = [by_rows, (seen, same_bias), (mask, bias[:1, :1]), (mask, bias[:1, :, :1])]
    others += [(mask, bias[:1].long()), (mask, bias[0])]
    for number, given in enumerate([*native, *others]):
        with counted() as calls:
            found = ours(x, *given)[0]
        assert calls["layers"] == (number < len(native))
        expected = stock(x, *given)[0]
        torch.testing.assert_close(found.to(expected.dtype), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_bias_may_change_between_passes() -> None:
    stock, given = build(), batch([11, 3, 7])
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    before = ours(**given).last_hidden_state
    for model in (stock, ours):
        model.encoder.relative_attention_bias.weight.mul_(-1)
    found = ours(**given)
    assert not torch.allclose(found.last_hidden_state, before, atol=1e-3)
    same(found, stock(**given), given["attention_mask"])


@torch.no_grad()
def test_module_by_module_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, given = build(), batch([11, 3, 7])
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    ours(**given)
    for module in ours.modules():
        for known in getattr(vars(module).get(FUSED), "_known", {}).values():
            if isinstance(getattr(known, "programme", None), EncoderProgramme):
                monkeypatch.setattr(known.programme, "max_tokens", 1)
    with counted() as calls:
        found = ours(**given)
    assert calls["layers"] == 3
    same(found, stock(**given), given["attention_mask"])
