"""A quantized head is untied from its embedding; every other tie survives patch, save and load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MarianConfig,
    MarianMTModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

import hf_accel
from hf_accel.linear import QuantLinear
from hf_accel.patching.originals import remaining_ties

from ...parity.families import DECODER, build
from ...parity.snapshot import bits, snapshot

T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BART = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
BERT = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
MAKE: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "umt5": lambda: UMT5ForConditionalGeneration(UMT5Config(**T5)),  # whose forward reads tie_word_embeddings
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BART)),
    "marian": lambda: MarianMTModel(MarianConfig(**BART)),
    "bert": lambda: BertForMaskedLM(BertConfig(**BERT)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**BERT)),
    "albert": lambda: AlbertForMaskedLM(AlbertConfig(**BERT, embedding_size=32)),
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, state_size=8, use_mambapy=False)
    ),
    "gpt": lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=99, n_embd=32, n_layer=1, n_head=4)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**DECODER, tie_word_embeddings=True)),
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "default": {},
    "no head": {"weights": {"head": None}},
    "skip": {"weights": {"skip": ["lm_head"]}},
    "skip decoder": {"weights": {"skip": ["decoder"]}},
    "int4": {"weights": {"bits": 4, "group_size": 32}},
}


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MAKE[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        if "embed_positions" not in parameter_name:  # sinusoids, which are not saved
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.arange(3, 11)[None]
    decoder = {"decoder_input_ids": ids[:, :4]} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **decoder).logits


CASES = [(name, keywords) for name in MAKE for keywords in ("default", "no head")]
CASES += [("t5", "skip"), ("llama", "skip"), ("bert", "skip decoder")]
CASES += [(name, "int4") for name in ("t5", "bert", "llama")]
# Where the head stays as it is, these have the ties of T5, BART, BERT and LLaMA.
SAME = [(name, "no head") for name in ("umt5", "marian", "roberta", "albert", "mamba", "gpt")]


@pytest.mark.parametrize(
    ("name", "keywords"), [pytest.param(*case, marks=pytest.mark.long if case in SAME else ()) for case in CASES]
)
def test_saved_quantized_and_loaded(name: str, keywords: str, tmp_path: Path) -> None:
    model = make(name)
    kind, stock, ties = type(model), logits(model), dict(model.all_tied_weights_keys)
    own = vars(model).get("_tied_weights_keys")
    assert ties
    hf_accel.patch(model, **KEYWORDS[keywords])
    expected = logits(model)
    torch.testing.assert_close(expected, stock, rtol=0, atol=1.0 if keywords == "int4" else 0.15)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    loaded, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert bits(logits(loaded)) == bits(expected)
    model.tie_weights()  # as resizing embeddings and others do
    loaded.tie_weights()
    assert bits(logits(model)) == bits(logits(loaded)) == bits(expected)
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert bits(logits(kind.from_pretrained(again))) == bits(expected)
    hf_accel.unpatch(model)
    assert bits(logits(model)) == bits(stock)
    assert model.all_tied_weights_keys == ties
    assert vars(model).get("_tied_weights_keys") is own


@pytest.mark.covering(1)
@pytest.mark.parametrize("keywords", ["default", "no head"])
@pytest.mark.parametrize("name", ["t5", "bert", "gpt", "llama"])
def test_packed_while_loading(name: str, keywords: str, tmp_path: Path) -> None:
    model = make(name)
    kind, stock = type(model), logits(model)
    model.save_pretrained(tmp_path)
    expected = logits(hf_accel.patch(model, **KEYWORDS[keywords]))
    loaded = kind.from_pretrained(tmp_path, quantization_config=hf_accel.AccelConfig(**KEYWORDS[keywords]))
    assert bits(logits(loaded)) == bits(expected)
    assert bits(logits(hf_accel.unpatch(loaded))) == bits(stock)


@pytest.mark.parametrize(
    ("name", "keywords", "tied"),
    [
        ("llama", "default", False),  # nothing is tied any more
        ("llama", "no head", True),
        ("llama", "skip", True),
        ("t5", "default", True),  # encoder and decoder share their embedding
        ("bert", "default", True),  # the head's bias is the prediction's
    ],
)
def test_what_the_saved_config_says(name: str, keywords: str, tied: bool, tmp_path: Path) -> None:
    model = hf_accel.patch(make(name), **KEYWORDS[keywords])
    model.save_pretrained(tmp_path)
    assert type(model.config).from_pretrained(tmp_path).tie_word_embeddings is tied
    hf_accel.unpatch(model)
    assert model.config.tie_word_embeddings is True


@pytest.mark.parametrize("first", ["save", "unpatch"])
def test_saving_and_unpatching_in_either_order(first: str, tmp_path: Path) -> None:
    """A saved model is patched as before; an unpatched one is saved as stock is."""
    model = build("gpt2")
    before = snapshot(model)
    hf_accel.patch(model)
    if first == "save":
        model.save_pretrained(tmp_path)
        hf_accel.unpatch(model)
    else:
        hf_accel.unpatch(model)
        model.save_pretrained(tmp_path)
    after = snapshot(model)
    for entry in ("configs", "vars", "dicts"):  # transformers notes dtype and class where it saves
        before.pop(entry), after.pop(entry)
    assert after == before
    loaded = type(model).from_pretrained(tmp_path)
    assert isinstance(loaded.lm_head, QuantLinear) == (first == "save")
    if first == "unpatch":
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


def test_a_copy_keeps_the_ties_that_are_left() -> None:
    model = hf_accel.patch(make("bert"))
    other = copy.deepcopy(model)
    other.tie_weights()
    assert isinstance(other.get_output_embeddings(), QuantLinear)
    assert bits(logits(other)) == bits(logits(model))


@pytest.mark.parametrize(
    ("ties", "quantized", "remaining"),
    [
        ({"head.weight": "embed.weight", "head.bias": "bias"}, {"head"}, {"head.bias": "bias"}),
        ({"embed.weight": "head.weight"}, {"head"}, {}),
        ({"a.weight": "head.weight", "b.weight": "head.weight"}, {"head"}, {"b.weight": "a.weight"}),
        ({"head.weight": "embed.weight"}, {"other"}, {"head.weight": "embed.weight"}),
        ({"head_2.weight": "embed.weight"}, {"head"}, {"head_2.weight": "embed.weight"}),
    ],
)
def test_remaining_ties(ties: dict[str, str], quantized: set[str], remaining: dict[str, str]) -> None:
    assert remaining_ties(ties, quantized) == remaining
