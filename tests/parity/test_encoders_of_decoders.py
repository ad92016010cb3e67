"""Encoders whose output a decoder reads: stock's numbers at padding too, and the same texts from generate()."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_accel
from hf_accel.fused import encoder_rows
from hf_accel.kernels import cpu as kernels
from hf_accel.patching import attention_survey
from tests.families.models import enliven

from .test_encoders import batch, counted

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

SIZES: dict[str, Any] = {
    "vocab_size": 61, "d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
HEADS = {"Whisper": "WhisperForConditionalGeneration", "Marian": "MarianMTModel"}
TEXTS = ["Bart", "MBart", "Marian", "Pegasus", "Blenderbot", "BlenderbotSmall", "M2M100", "PLBart"]


def build(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
    """A model of the family, and a padded batch for it."""
    sizes = {"max_source_positions": 20, "num_mel_bins": 8} if family == "Whisper" else {"max_position_embeddings": 40}
    name = HEADS.get(family, f"{family}ForConditionalGeneration")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **sizes)
    config.forced_eos_token_id = None
    model = getattr(transformers, name)(config)
    enliven(model)
    given = batch([11, 3, 7])
    if family == "Whisper":
        given = {"input_features": torch.randn(3, 8, 40).to(dtype)}
    return model.to(dtype).eval(), given


def near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["Whisper", *TEXTS])
@torch.no_grad()
def test_outputs_are_stocks_at_padding_too(family: str, dtype: torch.dtype) -> None:
    """In float16 their layers clamp what they return, so that they run module by module."""
    stock, given = build(family, dtype)
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    given |= {"decoder_input_ids": torch.tensor([[2, 9]] * 3)}
    with counted() as calls:
        found = ours(**given)
    assert calls["layers"] == (0 if dtype is torch.float16 else 2)
    expected, tolerance = stock(**given), 2e-5 if dtype is torch.float32 else 0.04
    near(found.logits, expected.logits, tolerance)
    near(found.encoder_last_hidden_state, expected.encoder_last_hidden_state, tolerance)


@pytest.mark.parametrize("family", ["Whisper", *TEXTS])
@torch.no_grad()
def test_generated_tokens_are_stocks(family: str) -> None:
    stock, given = build(family)
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    for options in ({"do_sample": False}, {"num_beams": 3}):
        asked = {"max_new_tokens": 8, **options}
        with counted() as calls:
            found = ours.generate(**given, **asked)
        assert calls["layers"] == 2
        assert torch.equal(found, stock.generate(**given, **asked))


@pytest.mark.parametrize("family", ["Whisper", "Bart", "Marian"])
@torch.no_grad()
def test_integer_weights_are_near(family: str) -> None:
    stock, given = build(family)
    ours = hf_accel.patch(copy.deepcopy(stock), weights="int8")
    with counted() as calls:
        found = ours.get_encoder()(**given).last_hidden_state
    assert calls["layers"] == 2
    near(found, stock.get_encoder()(**given).last_hidden_state, 0.06)


@torch.no_grad()
def test_a_decoder_without_a_mask_sees_stocks_numbers_at_padding() -> None:
    stock, given = build("Bart")
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    prompt = {"decoder_input_ids": torch.tensor([[2, 9]] * 3)}
    found = ours(encoder_outputs=ours.get_encoder()(**given), **prompt).logits
    expected = stock(encoder_outputs=stock.get_encoder()(**given), **prompt).logits
    near(found, expected, 2e-5)
    masked = stock(encoder_outputs=stock.get_encoder()(**given), attention_mask=given["attention_mask"], **prompt)
    assert not torch.allclose(masked.logits, expected, atol=1e-3)  # padding counts


@pytest.mark.parametrize("most", [1, 13, 30])
@torch.no_grad()
def test_padding_in_several_calls_and_module_by_module(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, given = build("MBart")
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None).get_encoder()
    expected = stock.get_encoder()(**given).last_hidden_state
    monkeypatch.setattr(encoder_rows, "CALL_TOKENS", most)
    near(ours(**given).last_hidden_state, expected, 2e-5)
    long = batch([38, 40, 2, 9, 33, 40, 40])  # more rows than a native call of float weights takes
    with counted() as calls:
        found = ours(**long).last_hidden_state
    assert calls["layers"] == 2
    near(found, stock.get_encoder()(**long).last_hidden_state, 2e-5)


def on_the_left(mask: Tensor) -> Tensor:
    return mask.flip(1)


def with_holes(mask: Tensor) -> Tensor:
    mask[0, 2:5] = 0
    return mask


@pytest.mark.parametrize("change", [on_the_left, with_holes])
@torch.no_grad()
def test_padding_elsewhere_is_stocks(change: Callable[[Tensor], Tensor]) -> None:
    stock, given = build("Bart")
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    given["attention_mask"] = change(given["attention_mask"])
    with counted() as calls:
        found = ours.get_encoder()(**given).last_hidden_state
    assert not calls["layers"]
    near(found, stock.get_encoder()(**given).last_hidden_state, 2e-5)


@torch.no_grad()
def test_another_attention_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's attention stays stock's where its decoder is not known."""
    monkeypatch.setattr(attention_survey, "decoder_refusal", lambda model: "its decoder is not known")
    stock, given = build("Bart")
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None).get_encoder()
    with counted() as calls:
        before = ours(**given).last_hidden_state
    assert calls["layers"] == 2
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    known = functions["sdpa"]
    with monkeypatch.context() as patch:
        patch.setitem(functions._global_mapping, "sdpa", lambda *args, **kwargs: (known(*args, **kwargs)[0] * 2, None))
        with counted() as calls:
            found = ours(**given).last_hidden_state
        assert not calls["layers"] and not torch.allclose(found, before, atol=1e-3)
    with counted() as calls:
        assert torch.equal(ours(**given).last_hidden_state, before)
    assert calls["layers"] == 2


@torch.no_grad()
def test_eager_attention_is_computed_by_the_same_call() -> None:
    stock, given = build("Bart")
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    for model in (ours, stock):
        model.set_attn_implementation("eager")
    with counted() as calls:
        found = ours.get_encoder()(**given).last_hidden_state
    assert calls["layers"] == 2
    near(found, stock.get_encoder()(**given).last_hidden_state, 2e-5)
    prompt = {"decoder_input_ids": torch.tensor([[2, 9]] * 3), "output_attentions": True}
    found, expected = ours(**given, **prompt), stock(**given, **prompt)
    assert len(found.encoder_attentions) == 2
    for one, other in zip(found.encoder_attentions, expected.encoder_attentions, strict=True):
        near(one, other, 2e-5)


def test_the_plan_says_so() -> None:
    lines = {line.what: line for line in hf_accel.plan(build("Bart")[0], weights=None).lines if line.topic == "fused"}
    assert lines["2 encoder layers"].choice == "one native call each"
    assert not any("encoder layer" in what for what in lines if what != "2 encoder layers")


@torch.no_grad()
def test_two_encoders_as_encoder_and_decoder() -> None:
    """A BERT in front of a decoder keeps its numbers at padding; alone, it need not."""
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    config = transformers.BertConfig(**sizes, num_hidden_layers=2, attn_implementation="sdpa")
    decoder = transformers.BertConfig(**sizes, num_hidden_layers=1, is_decoder=True, add_cross_attention=True)
    torch.manual_seed(0)
    model = transformers.EncoderDecoderModel(
        transformers.EncoderDecoderConfig.from_encoder_decoder_configs(config, decoder)
    )
    enliven(model)
    stock, given = model.eval(), batch([11, 3, 7])
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    given |= {"decoder_input_ids": torch.tensor([[2, 9]] * 3)}
    with counted() as calls:
        found = ours(**given)
    assert calls["layers"] == 2
    expected = stock(**given)
    near(found.logits, expected.logits, 2e-5)
    near(found.encoder_last_hidden_state, expected.encoder_last_hidden_state, 2e-5)
