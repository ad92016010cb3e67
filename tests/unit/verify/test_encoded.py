"""Encoders compared by their outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_accel.cli import encoders
from hf_accel.cli.measurement import WrongResultError
from hf_accel.cli.topics import Sizes
from hf_accel.errors import UnsupportedError
from hf_accel.estimate.lengths import longest_text
from hf_accel.verify.encoded import compare_encoders, encoder_inputs
from tests.parity.test_encoders import build


def test_padding_is_left_out() -> None:
    model, reference = build(), build()
    inputs = encoder_inputs(model, [9, 4])

    def spoil(module: nn.Module, args: Any, output: Any) -> Any:
        output["last_hidden_state"] = output.last_hidden_state * inputs["attention_mask"][..., None]
        return output

    model.register_forward_hook(spoil)
    found, *pooled = compare_encoders(model, reference, inputs)
    assert (found.output, found.rows, found.difference) == ("last_hidden_state", 13, 0)
    assert found.cosine == pytest.approx(1)
    assert [(one.output, one.rows, one.difference) for one in pooled] == [
        ("mean over tokens", 2, 0), ("pooler_output", 2, 0),
    ]  # fmt: skip


def test_a_difference_is_seen() -> None:
    model, reference = build(), build()
    with torch.no_grad():
        next(model.parameters())[5:, ::2].add_(0.5)
    found, *_ = compare_encoders(model, reference, encoder_inputs(model, [9, 4]))
    assert found.cosine < 0.999 and found.difference > 1e-3


def test_a_wrong_encoder_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wrong = build(), build()

    def negate(module: nn.Module, args: Any, output: Any) -> Any:
        output["last_hidden_state"] = -output.last_hidden_state
        return output

    wrong.register_forward_hook(negate)
    monkeypatch.setattr(encoders, "both", lambda *_: {"stock": model, "patched": wrong})
    with pytest.raises(WrongResultError, match="patched: of 8 vectors of last_hidden_state one has a cosine of -1"):
        encoders.encode(model, {}, Sizes(8, 1, 2, 1), lambda text: None)


def test_inputs() -> None:
    model: Any = build("Roberta")
    inputs: dict[str, Tensor] = encoder_inputs(model, [5, 2])
    padding = inputs["input_ids"] == model.config.pad_token_id
    assert torch.equal(padding, inputs["attention_mask"] == 0)
    assert longest_text(model, 500) == 78  # 80 positions, which are counted from the padding's 1
    model(**encoder_inputs(model, [longest_text(model, 500)]))
    model.main_input_name = "something"
    with pytest.raises(UnsupportedError, match="starts from something"):
        encoder_inputs(model, [1])
