"""Certificates of encoders: against a stock model, one that computes something else, and one that was changed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    PreTrainedModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

import hf_accel
from hf_accel.errors import UnsupportedError
from hf_accel.verify.certificate import EncoderCost, PassVerdict
from hf_accel.verify.encoded import MEAN, encoder_batches
from tests.families.models import enliven
from tests.parity.snapshot import snapshot
from tests.parity.test_encoders import build
from tests.unit.estimate.test_encoders import SOUND

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2,
}  # fmt: skip
IMAGES = {"image_size": 16, "patch_size": 8}
WORDS: dict[str, Any] = {"vocab_size": 61, "bos_token_id": 2, "eos_token_id": 3}


def text() -> PreTrainedModel:
    return build("Bert", hidden_size=64, intermediate_size=96, num_attention_heads=4)


def clip() -> PreTrainedModel:
    return CLIPModel(CLIPConfig(text_config=SIZES | WORDS, vision_config=SIZES | IMAGES))


def image() -> PreTrainedModel:
    return ViTModel(ViTConfig(**SIZES, **IMAGES))


def sound() -> PreTrainedModel:
    return Wav2Vec2Model(Wav2Vec2Config(**SIZES, **SOUND))


BATCHES = {text: 6, clip: 6, image: 2, sound: 3}


def made(make: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = make().eval()
    enliven(model)
    return model


def passes(certificate: hf_accel.Certificate) -> list[PassVerdict]:
    found = [verdict for verdict in certificate.verdicts if isinstance(verdict, PassVerdict)]
    assert len(found) == len(certificate.verdicts)
    return found


@pytest.mark.filterwarnings("ignore:.*bos_token_id.*")
@pytest.mark.parametrize("weights", [None, "int8", {"bits": 4, "group_size": 32}], ids=str)
@pytest.mark.parametrize("make", BATCHES, ids=lambda make: make.__name__)
@pytest.mark.covering(1)
def test_what_is_computed_right_is_certified(make: Any, weights: Any) -> None:
    model = hf_accel.patch(made(make), weights=weights)
    certificate = hf_accel.verify(model, reference=made(make))
    assert certificate.explained and len(passes(certificate)) == BATCHES[make]
    assert all(verdict.refused is None and verdict.agreements for verdict in passes(certificate))
    assert "an unpatched copy has all modules and, bit for bit, all" in str(certificate.undo)
    if weights is None:
        assert certificate.cost is None
        assert max(most for verdict in passes(certificate) for most in verdict.rounding) < 1e-4
    else:
        cost = certificate.cost
        assert isinstance(cost, EncoderCost) and certificate.reference == "the quantized reference"
        assert all(0.9 < one.cosine <= one.mean_cosine < 1 for one in cost.agreements)
        assert all(one.rows for one in cost.agreements)
    assert json.loads(json.dumps(certificate.to_dict()))["explained"] is True
    assert f"{BATCHES[make]} of {BATCHES[make]} batches" in str(certificate)


def test_a_batch_that_is_computed_wrong_is_named() -> None:
    """Only where padding is on the right, and only by a thousandth."""
    model = hf_accel.patch(made(text), weights=None)

    def spoil(module: nn.Module, args: Any, keywords: dict[str, Any], output: Any) -> None:
        mask = keywords.get("attention_mask")
        if mask is not None and not mask[:, -1].all():
            output.last_hidden_state[0, 0, 0] += 1e-3

    model.register_forward_hook(spoil, with_kwargs=True)
    certificate = hf_accel.verify(model, reference=made(text))
    wrong = [verdict.batch for verdict in passes(certificate) if not verdict.explained]
    assert wrong == ["4 of 12 to 48 tokens, padded on the right", "4 of 12 to 48 tokens, a mask of booleans"]
    assert not certificate.explained and not certificate.exact
    assert str(certificate).startswith("certificate: 4 of 6 batches as the given BertModel within rounding")
    assert str(certificate).count("beyond rounding") == 2


def test_numbers_that_are_not_finite_are_no_rounding() -> None:
    model = hf_accel.patch(made(image), weights=None)

    def spoil(module: nn.Module, args: Any, output: Any) -> None:
        output.last_hidden_state.fill_(torch.nan)

    model.register_forward_hook(spoil)
    assert not hf_accel.verify(model, reference=made(image)).explained


@pytest.mark.parametrize("weights", [None, "int8"])
def test_verify_changes_nothing(weights: str | None) -> None:
    model = hf_accel.patch(made(text), weights=weights)
    given = encoder_batches(model, 8)["one of 8 tokens"]
    before, drawn = snapshot(model, given), torch.get_rng_state()
    hf_accel.verify(model, reference=made(text))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert snapshot(model, given) == before and hf_accel.is_patched(model)


def test_another_float_model_is_told_by_its_bits() -> None:
    other = made(text)
    model = hf_accel.patch(copy.deepcopy(other), weights="int8")
    name, weight = next((n, p) for n, p in other.named_parameters() if "value.weight" in n)
    weight.data[3, 3] = torch.nextafter(weight.data[3, 3], torch.tensor(9.0))
    undo = str(hf_accel.verify(model, reference=other).undo)
    assert undo.startswith("1 of ") and name in undo


def test_without_originals_the_cost_is_not_measured(tmp_path: Path) -> None:
    hf_accel.patch(made(text), weights="int8").save_pretrained(tmp_path)
    made(text).save_pretrained(tmp_path / "float")
    loaded = hf_accel.load(tmp_path).eval()
    certificate = hf_accel.verify(loaded)
    assert certificate.explained and certificate.cost is None
    assert "no original weights" in str(certificate.no_cost) and "not compared" in str(certificate.undo)
    by_path = hf_accel.verify(loaded, reference=tmp_path / "float")
    assert isinstance(by_path.cost, EncoderCost) and by_path.cost.reference == str(tmp_path / "float")


def test_texts_are_compared_alone_and_together() -> None:
    model = hf_accel.patch(made(text), weights=None)
    certificate = hf_accel.verify(model, [[5, 6, 7], [9, 8, 7, 6, 5]])
    assert [verdict.batch for verdict in passes(certificate)] == ["text 0", "text 1", "all 2 texts, padded"]
    assert [verdict.agreements[0].rows for verdict in passes(certificate)] == [3, 5, 8]
    with pytest.raises(UnsupportedError, match="pass tokenizer="):
        hf_accel.verify(model, ["a text"])
    by_words = hf_accel.verify(model, "a text", tokenizer=lambda words: {"input_ids": [7] * len(words)})
    assert passes(by_words)[0].agreements[0].rows == 6


def test_inputs_are_taken_as_given() -> None:
    model = hf_accel.patch(made(sound), weights=None)
    [verdict] = passes(hf_accel.verify(model, {"input_values": torch.randn(1, 4000)}))
    assert verdict.batch == "the inputs given" and verdict.explained


def test_what_the_reference_refuses_is_not_compared() -> None:
    model, reference = hf_accel.patch(made(text), weights=None), made(text)

    def refuse(module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        if keywords.get("attention_mask") is not None and keywords["attention_mask"].dtype is torch.bool:
            raise ValueError("no booleans")

    reference.register_forward_pre_hook(refuse, with_kwargs=True)
    certificate = hf_accel.verify(model, reference=reference)
    assert "not compared, the reference refuses it: ValueError: no booleans" in " ".join(str(certificate).split())
    assert str(certificate).startswith("certificate: 5 of 5 batches")
    with pytest.raises(UnsupportedError, match="takes none of the batches: the inputs given: IndexError"):
        hf_accel.verify(model, {"input_ids": torch.full((1, 3), 1000)})


def test_masks_of_every_form_hold_the_same_texts() -> None:
    batches = encoder_batches(made(text), 48)
    right, left = (batches[f"4 of 12 to 48 tokens, padded on the {side}"] for side in ("right", "left"))
    for row in range(4):
        shown = [one["input_ids"][row][one["attention_mask"][row] > 0] for one in (right, left)]
        assert torch.equal(*shown) and len(shown[0]) == 48 - 12 * row
    assert not left["attention_mask"][1:, 0].any() and left["attention_mask"][:, -1].all()
    [verdict] = passes(hf_accel.verify(hf_accel.patch(made(text), weights=None), left))
    assert [one.output for one in verdict.agreements] == ["last_hidden_state", MEAN, "pooler_output"]


def test_what_is_refused() -> None:
    model = hf_accel.patch(made(text), weights=None)
    with pytest.raises(UnsupportedError, match="leave text=, do_sample= out"):
        hf_accel.verify(model, text="x", do_sample=False)
    with pytest.raises(UnsupportedError, match="is the model itself"):
        hf_accel.verify(model, reference=model)
    with pytest.raises(UnsupportedError, match="not patched"):
        hf_accel.verify(made(text))
    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    with pytest.raises(UnsupportedError, match="body of an encoder-decoder"):
        hf_accel.verify(hf_accel.patch(T5Model(T5Config(**sizes)), weights=None))
