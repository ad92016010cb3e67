"""Padding on the right: the last column chooses a row's first token, as in transformers' loop."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_accel
from hf_accel import CacheConfig

from ..families.models import build, family

NEW_TOKENS = 12
LLAMA, GPT, LEARNED, WINDOWED = "LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "MistralForCausalLM"


def fresh(name: str) -> Any:
    return build(family(name), gain=2.0)


@cache
def stock(name: str) -> Any:
    return fresh(name)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 100, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([[5], [9], [1], [8]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def answer(model: Any, given: dict[str, Tensor], **settings: Any) -> Tensor:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about this padding
        result: Tensor = model.generate(**given, **{"max_new_tokens": NEW_TOKENS, "do_sample": False, **settings})
    return result


def loop(model: Any) -> str:
    return str(hf_accel.stats(model)["loop"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [LLAMA, GPT, LEARNED])
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "top_k": 5, "num_return_sequences": 2}], ids=str)
def test_tokens_are_those_of_stock(name: str, settings: dict[str, Any]) -> None:
    model = hf_accel.patch(fresh(name), weights=None)
    expected = answer(stock(name), batch(), **settings)
    for _ in range(2):  # the second call finds what the first has kept
        assert torch.equal(answer(model, batch(), **settings), expected)
        assert loop(model) == "ragged"
    left = {key: value.flip(1) for key, value in batch().items()}
    assert torch.equal(answer(model, left, **settings), answer(stock(name), left, **settings))


@pytest.mark.parametrize("settings", [{"block_size": 1}, {"block_size": 4, "max_tokens": 32}], ids=str)
def test_sequences_wait_and_begin_again(settings: dict[str, Any]) -> None:
    """A sequence that is computed again after it has said something does not ask a second time."""
    model = hf_accel.patch(fresh(LLAMA), weights=None, cache=CacheConfig(**settings))
    assert torch.equal(answer(model, batch()), answer(stock(LLAMA), batch()))
    assert loop(model) == "ragged"


def test_drafts_change_nothing() -> None:
    model = hf_accel.patch(fresh(LLAMA), weights=None, speculative="ngram")
    assert torch.equal(answer(model, batch(), max_new_tokens=30), answer(stock(LLAMA), batch(), max_new_tokens=30))
    assert loop(model) == "ragged"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (LLAMA, {"num_beams": 2}),
        (LLAMA, {"repetition_penalty": 1.3}),
        (LLAMA, {"no_repeat_ngram_size": 2}),
        (WINDOWED, {}),
    ],
    ids=str,
)
def test_what_reads_padding_goes_to_stock(name: str, settings: dict[str, Any]) -> None:
    model = hf_accel.patch(fresh(name), weights=None)
    assert torch.equal(answer(model, batch(), **settings), answer(stock(name), batch(), **settings))
    assert "padding stands behind" in loop(model)


def test_holes_in_a_mask_go_to_stock() -> None:
    given = batch()
    given["attention_mask"][1, 4] = 0
    model = hf_accel.patch(fresh(LLAMA), weights=None)
    assert torch.equal(answer(model, given), answer(stock(LLAMA), given))
    assert "padding stands behind or between" in loop(model)


def padded_by_more_than_a_window() -> dict[str, Tensor]:
    """Row 2 ends in as many columns without a token as a window has, and row 0 has some between tokens."""
    ids = torch.randint(3, 100, (3, 13), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(13) < torch.tensor([[13], [10], [7]])).long()
    mask[0, 4:6] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "DogeForCausalLM", "MistralLarge4ForConditionalGeneration"])
def test_padding_that_is_read_stays_in_transformers_cache(name: str, settings: dict[str, Any]) -> None:
    """A query in a window of padding alone sees that padding, an indexer and a layer's own code read it."""
    given = padded_by_more_than_a_window()
    model = hf_accel.patch(build(family(name)), weights=None)
    expected = answer(build(family(name)), given, max_new_tokens=6, **settings)
    assert torch.equal(answer(model, given, max_new_tokens=6, **settings), expected)
    assert loop(model) == "stock: padding stands behind or between tokens"
