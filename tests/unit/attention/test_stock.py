"""Parts of a model that attend in ways of their own: they go on with that, and the decoder gets ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_accel
from hf_accel.attention.hf import ATTENTION_NAME
from hf_accel.attention.hf.stock import set_our_attention, stock_parts
from tests.families.models import build, family

TOWER = "model.audio_tower"


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    """Its audio tower computes attention by itself, with a mask that it makes by its config's implementation."""
    return build(family("Gemma4ForConditionalGeneration"))


def heard(model: PreTrainedModel) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    tower: Any = model.get_submodule(TOWER)
    sound = torch.randn(2, 64, 128, generator=generator)
    there = torch.ones(2, 64, dtype=torch.bool)
    there[1, 40:] = False
    output: Tensor = tower(sound, there).last_hidden_state
    return output


def implementations(model: PreTrainedModel) -> dict[str, str]:
    parts = ((n, m) for n, m in model.named_modules() if isinstance(m, PreTrainedModel))
    return {name: str(part.config._attn_implementation) for name, part in parts}


@torch.no_grad()
def test_a_tower_keeps_its_attention(stock: PreTrainedModel) -> None:
    assert stock_parts(stock) == {TOWER: "Gemma4AudioAttention computes attention by itself"}
    before, own = heard(stock), implementations(stock)
    patched = hf_accel.patch(copy.deepcopy(stock), weights=None, fuse=False, cache="paged")
    assert implementations(patched) == dict.fromkeys(own, ATTENTION_NAME) | {TOWER: own[TOWER]}
    assert torch.equal(heard(patched), before)
    line = next(line for line in hf_accel.plan(stock, weights=None).lines if line.what == TOWER)
    assert (line.choice, line.reason) == ("stock", "Gemma4AudioAttention computes attention by itself")
    assert implementations(hf_accel.unpatch(patched)) == own


@torch.no_grad()
def test_setting_our_attention_back_leaves_the_tower_as_it_is(stock: PreTrainedModel) -> None:
    patched = hf_accel.patch(copy.deepcopy(stock), weights=None)
    before = implementations(patched)
    patched.set_attn_implementation("eager")
    assert set(implementations(patched).values()) == {"eager"}
    patched.set_attn_implementation(ATTENTION_NAME)
    kept = {"eager", before[TOWER]}  # older transformers has given it sdpa, which "eager" has replaced
    assert implementations(patched)[TOWER] in kept
    assert implementations(patched) | {TOWER: ""} == before | {TOWER: ""}
    patched.set_attn_implementation({"text_config": "eager"})  # transformers' other form goes on to transformers
    assert implementations(patched)["model.language_model"] == "eager"
    assert implementations(patched)[TOWER] == "eager"


def test_a_tower_that_was_set_to_ours_by_name_goes_back_to_what_it_can_do(stock: PreTrainedModel) -> None:
    model = copy.deepcopy(stock)
    model.set_attn_implementation(ATTENTION_NAME)
    set_our_attention(model, model.set_attn_implementation)
    assert implementations(model)[TOWER] == implementations(stock)[TOWER] != ATTENTION_NAME


def test_a_part_that_the_decoder_is_in_keeps_nothing(stock: PreTrainedModel) -> None:
    """Its config is the decoder's too, so that the whole model stays with stock's attention."""
    model = copy.deepcopy(stock)
    tower: Any = model.get_submodule(TOWER)
    tower.config = model.config.get_text_config()
    assert stock_parts(model) == {}
    assert hf_accel.plan(model).stock_attention == "Gemma4AudioAttention computes attention by itself"
    with pytest.raises(hf_accel.UnsupportedError, match="Gemma4AudioAttention computes attention by itself"):
        hf_accel.patch(model, attention="cpu")
