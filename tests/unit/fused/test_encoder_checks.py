"""Combinations of causal attention, biases, caps and caches that no native call computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer

import hf_accel
from hf_accel.attention.hf import ATTENTION_NAME
from hf_accel.fused.encoder_programme import Causal, EncoderProgramme
from hf_accel.fused.encoder_rows import RowLayout, layout_of
from hf_accel.fused.hf.encoder_checks import scale_of
from hf_accel.kernels import cpu as kernels
from hf_accel.recognition.call_form import usual_form
from hf_accel.recognition.operation import UntraceableError
from hf_accel.recognition.trace import Trace


def bert() -> Any:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 1}
    return BertModel(BertConfig(**sizes, vocab_size=11)).eval()


def traced(model: Any = None, layer_idx: int | None = None, biased: bool = False, **options: Any) -> Trace:
    """The trace of a layer of BERT, whose attention is then said to have these options."""
    trace = Trace(torch.float32, attention=ATTENTION_NAME)
    trace.layer((model or bert()).encoder.layer[0], 32, usual_form(BertLayer))
    values = next(operation.values for operation in trace.operations if operation.kind == "attend")
    trace.layer_idx, values["biased"] = layer_idx, biased
    values["options"] |= options
    return trace


KNOWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}), "torch's": ({}, {"keeps_sdpa": True}), "capped": ({"softcap": 5.0}, {}),
    "causal": ({"is_causal": True}, {"causal": True}), "biased": ({"biased": True}, {}),
    "causal, over a cache": ({"is_causal": True, "layer_idx": 0}, {"causal": True}),
    "torch's and biased": ({"biased": True}, {"keeps_sdpa": True}),
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal without a mask that says so": ({"is_causal": True}, {}),
    "not causal with one that says so": ({}, {"causal": True}),
    "causal and biased": ({"is_causal": True, "biased": True}, {"causal": True}),
    "capped and biased": ({"softcap": 5.0, "biased": True}, {}),
    "biased over a cache": ({"biased": True, "layer_idx": 0}, {}),
    "torch's, which caps nothing": ({"softcap": 5.0}, {"keeps_sdpa": True}),
    "torch's and causal": ({"is_causal": True}, {"causal": True, "keeps_sdpa": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", KNOWN)
def test_known_attention_has_its_scale(case: str) -> None:
    values, options = KNOWN[case]
    assert scale_of(traced(**values), masked=True, **options) == 16**-0.5


@pytest.mark.parametrize("case", REFUSED)
def test_other_attention_ends_a_trace(case: str) -> None:
    values, options = REFUSED[case]
    with pytest.raises(UntraceableError, match="its attention"):
        scale_of(traced(**values), masked=True, **options)


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
def test_padding_is_computed_by_layers_that_see_all_tokens_alone() -> None:
    layout = layout_of(torch.tensor([[[[True, True, True]]], [[[True, False, False]]]]), 2, 3)
    assert isinstance(layout, RowLayout) and layout.index is not None
    model = hf_accel.patch(bert(), weights=None)
    programme = EncoderProgramme(traced(model), 0.25)
    computed = programme.with_padding(layout)
    assert computed is not None and computed.index is None
    programme.window = 2
    assert programme.with_padding(layout) is None
    assert EncoderProgramme(traced(model), 0.25, causal=Causal()).with_padding(layout) is None
