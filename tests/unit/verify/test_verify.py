from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_accel
from hf_accel.verify import Verdict

from ..parity.families import build, prompts
from ..parity.snapshot import snapshot

PROMPTS = [prompts(1, 7)[0], prompts(1, 12, seed=2)[0].tolist()]


def tampered(model: PreTrainedModel, call: int) -> PreTrainedModel:
    """From the given call on, the best token is the worst."""

    def spoil(_: Any, args: Any, output: Any) -> None:
        if next(calls) >= call:
            best = output.logits[:, -1].argmax(-1, keepdim=True)
            output.logits[:, -1].scatter_(1, best, -100.0)

    calls = itertools.count()
    model.register_forward_hook(spoil)
    return model


def test_identical() -> None:
    model = hf_accel.patch(build("llama"), weights=None)
    certificate = hf_accel.verify(model, PROMPTS, max_new_tokens=6)
    assert (certificate.exact, certificate.explained) == (True, True)
    assert [v.tokens for v in certificate.verdicts] == [6, 6]
    assert certificate.reference == "the unpatched model"
    assert str(certificate).splitlines()[0] == ("certificate: 2 of 2 prompts identical to the unpatched model, greedy")
    assert json.loads(json.dumps(certificate.to_dict()))["exact"] is True


def test_verify_changes_nothing() -> None:
    model = hf_accel.patch(build("llama"), weights="int8")
    before = snapshot(model)
    hf_accel.verify(model, PROMPTS, max_new_tokens=2)
    assert snapshot(model) == before
    assert hf_accel.is_patched(model)


def test_first_difference_is_found_and_is_no_near_tie() -> None:
    model = build("llama")
    reference = build("llama")
    certificate = hf_accel.verify(tampered(model, call=2), [PROMPTS[1]], reference=reference, max_new_tokens=6)
    [verdict] = certificate.verdicts
    assert (certificate.exact, certificate.explained, verdict.identical) == (False, False, False)
    ids = torch.tensor([PROMPTS[1]])
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert (verdict.position, verdict.tokens) == (2, 2)
    assert verdict.reference_token == int(expected[0, 14])
    assert verdict.reference_logits is not None and verdict.margin is not None
    assert verdict.margin == pytest.approx(verdict.reference_logits[0] - verdict.reference_logits[1])
    assert verdict.margin > 0
    assert "beyond the rounding of" in str(certificate)


def test_near_tie_is_explained() -> None:
    """Two rows of the head that are the same but for the last bits: either token may come first."""
    model, reference = build("llama"), build("llama")
    ids = torch.tensor([PROMPTS[1]])
    best = int(reference(ids).logits[0, -1].argmax())
    twin = (best + 1) % 101
    with torch.no_grad():
        for m, factor in ((reference, 1 - 1e-7), (model, 1 + 3e-7)):
            m.lm_head.weight[twin] = m.lm_head.weight[best] * factor
    certificate = hf_accel.verify(model, [PROMPTS[1]], reference=reference, max_new_tokens=1)
    assert (certificate.exact, certificate.explained) == (False, True)
    assert certificate.verdicts[0].model_token == twin
    assert "inside the rounding of" in str(certificate)


@pytest.mark.parametrize(("margin", "explained"), [(0.0, True), (0.1, True), (0.11, False), (None, False)])
def test_explained(margin: float | None, explained: bool) -> None:
    verdict = Verdict(identical=False, tokens=3, position=3, margin=margin, rounding=0.1)
    assert verdict.explained is explained


def test_int8_against_its_checkpoint(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    model = hf_accel.patch(build("llama"), weights=None)
    certificate = hf_accel.verify(model, PROMPTS, reference=tmp_path, max_new_tokens=4)
    assert certificate.exact
    assert certificate.reference == str(tmp_path)


def test_text_prompt() -> None:
    model = hf_accel.patch(build("llama"), weights=None)

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 32 for c in text]}

    assert hf_accel.verify(model, ["def main"], tokenizer=tokenizer, max_new_tokens=2).exact
    with pytest.raises(hf_accel.UnsupportedError, match="pass tokenizer=, or token ids"):
        hf_accel.verify(model, ["def main"])


def test_bad_input() -> None:
    with pytest.raises(hf_accel.UnsupportedError, match="not patched; patch it, or pass reference="):
        hf_accel.verify(build("llama"), PROMPTS)
    model = hf_accel.patch(build("llama"), keep_original=False)
    with pytest.raises(hf_accel.UnsupportedError, match="no original weights to compare with; pass reference="):
        hf_accel.verify(model, PROMPTS)
    with pytest.raises(hf_accel.UnsupportedError, match="empty prompt"):
        hf_accel.verify(model, [[]], reference=build("llama"))
