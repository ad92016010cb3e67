"""An embedding that looks its rows up in the quantized head of a tied model."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_accel
from hf_accel import WeightConfig
from hf_accel.linear.embedding import QuantEmbedding

ONE_TABLE = WeightConfig(bits=4, group_size=32, embedding="int8")
IDS = torch.tensor([[3, 0, 77, 129, 64]])


def tied_model(*, tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=130, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_rows_are_those_of_the_head_and_undo_gives_the_very_objects_back() -> None:
    model = tied_model()
    embedding, weight = model.get_input_embeddings(), model.lm_head.weight
    before = weight.detach().clone()
    hf_accel.patch(model, weights=ONE_TABLE)
    table = model.get_input_embeddings()
    assert isinstance(table, QuantEmbedding) and table.head is model.lm_head and not list(table.parameters())
    assert torch.equal(table(IDS), model.lm_head.quantized.dequantize(torch.float32)[IDS])
    for wrong in (-1, 130):
        with pytest.raises(IndexError):
            table(torch.tensor([wrong]))
    hf_accel.unpatch(model)
    assert model.get_input_embeddings() is embedding and embedding.weight is weight is model.lm_head.weight
    assert torch.equal(weight, before)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_share_one_table_of_their_own(again: Any) -> None:
    model = hf_accel.patch(tied_model(), weights=ONE_TABLE)
    other = again(model)
    assert other.get_input_embeddings().head is other.lm_head is not model.lm_head
    assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_a_saved_model_holds_one_table(tmp_path: Path) -> None:
    model: Any = hf_accel.patch(tied_model(), weights=ONE_TABLE)
    model.save_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().head is loaded.lm_head
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_resized_embedding_is_a_float_one_and_undo_keeps_the_tie() -> None:
    model = tied_model()
    before = model.lm_head.weight.detach().clone()
    hf_accel.patch(model, weights=ONE_TABLE)
    model.resize_token_embeddings(140, mean_resizing=False)
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
    model(IDS)
    hf_accel.unpatch(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight[:130], before)


def test_what_is_written_to_the_embedding_the_head_gets() -> None:
    model: Any = hf_accel.patch(tied_model(), weights=ONE_TABLE)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = 0.5
    assert torch.allclose(model.lm_head.quantized.dequantize(torch.float32)[5], torch.tensor(0.5))


def test_the_embedding_stays_by_default() -> None:
    model: Any = hf_accel.patch(tied_model(), weights="int8")
    assert type(model.get_input_embeddings()) is torch.nn.Embedding


@pytest.mark.parametrize(("tied", "head"), [(False, "int8"), (True, None)])
def test_what_cannot_share_is_refused(tied: bool, head: Any) -> None:
    model = tied_model(tied=tied)
    with pytest.raises(hf_accel.UnsupportedError, match="leave embedding= out"):
        hf_accel.patch(model, weights=replace(ONE_TABLE, head=head))
    assert not hf_accel.is_patched(model)
