"""Layers that attend to images, and to no tokens (Mllama): each token sees the images that stock shows it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mllama import modeling_mllama

import hf_accel
from hf_accel import CacheConfig, Engine, PagedCache, UnsupportedError
from hf_accel.cache.hf.cache_argument import CACHE_NAME

from ..families.models import build, family
from .older import skip_older_code

TILES, SIDE, IMAGES = 4, 32, 2
GATES = ("cross_attn_attn_gate", "cross_attn_mlp_gate")  # closed as long as a model is not trained
NEW_TOKENS = 8
WAIT = 60


def fresh(implementation: str = "sdpa") -> Any:
    model: Any = build(family("MllamaForConditionalGeneration"), gain=2.0)
    for name, parameter in model.named_parameters():
        if name.endswith(GATES):
            parameter.data.fill_(1.0)
    model.set_attn_implementation(implementation)
    return model


@cache
def stock(implementation: str = "sdpa") -> Any:
    return fresh(implementation)


def batch() -> dict[str, Tensor]:
    """Three rows: two images of one and three tiles, behind words that see none; one image; and none, padded."""
    generator = torch.Generator().manual_seed(7)
    image = stock().config.text_config.vocab_size  # it has an embedding, and no logit
    rows = [
        [1, 5, image, 9, 8, image, 7, 6],
        [1, image, 9, 8, 5, 6, 11, 4],
        [0, 0, 1, 9, 12, 5, 6, 7],
    ]
    ids = torch.tensor(rows)
    tiles = torch.zeros(3, IMAGES, TILES, dtype=torch.long)
    seen = torch.zeros(3, len(rows[0]), IMAGES, TILES, dtype=torch.long)
    for row, number, start, stop, count in ((0, 0, 2, 5, 1), (0, 1, 5, 8, 3), (1, 0, 1, 8, 2)):
        tiles[row, number, :count] = 1
        seen[row, start:stop, number, :count] = 1
    given = {
        "input_ids": ids,
        "attention_mask": (torch.arange(8) >= torch.tensor([[0], [0], [2]])).long(),
        "pixel_values": torch.randn(3, IMAGES, TILES, 3, SIDE, SIDE, generator=generator),
        "aspect_ratio_ids": torch.tensor([[1, 3], [2, 0], [0, 0]]),
        "aspect_ratio_mask": tiles,
        "cross_attention_mask": seen,
    }
    skip_older_code(stock(), "MllamaTextModel gives its layers more than hidden states", given=given)
    return given


def alone(row: int) -> dict[str, Tensor]:
    """Return one row as a processor makes it of a prompt: without padding, and the last one without images."""
    given = batch()
    tokens = given["attention_mask"][row].bool()
    own = {name: value[row : row + 1] for name, value in given.items() if name != "attention_mask"}
    own["input_ids"] = own["input_ids"][:, tokens]
    own["cross_attention_mask"] = own["cross_attention_mask"][:, tokens]
    return own if bool(own["aspect_ratio_ids"].any()) else {"input_ids": own["input_ids"]}


def answer(model: Any, given: dict[str, Any], **settings: Any) -> Tensor:
    torch.manual_seed(0)
    result: Tensor = model.generate(**given, **{"max_new_tokens": NEW_TOKENS, "do_sample": False, **settings})
    return result


def loop(model: Any) -> str:
    return str(hf_accel.stats(model)["loop"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5, "num_return_sequences": 2}], ids=str
)
def test_each_token_sees_its_images(implementation: str, settings: dict[str, Any]) -> None:
    model, given = hf_accel.patch(fresh(implementation), weights=None), batch()
    expected = answer(stock(implementation), given, **settings)
    assert torch.equal(answer(model, given, **settings), expected)
    assert loop(model) == "ragged"
    other = given | {"pixel_values": -given["pixel_values"]}
    assert not torch.equal(answer(model, other, **settings), expected)


@pytest.mark.parametrize("size", [1, 16])
def test_passes_hold_sequences_with_images_and_without(size: int) -> None:
    model = hf_accel.patch(fresh(), weights=None, cache=CacheConfig(block_size=size))
    prompts = [alone(row) for row in (0, 1, 2, 0)]
    expected = [answer(stock(), each)[0, each["input_ids"].shape[1] :].tolist() for each in prompts]
    found = model.generate_batch(prompts, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert [each.generated_tokens for each in found.values()] == expected
    with Engine(model, token_budget=3) as engine:
        jobs = [engine.submit(each, max_new_tokens=NEW_TOKENS) for each in (*prompts, {"input_ids": [[3, 4]]})]
        assert [job.result(WAIT).tokens for job in jobs[:-1]] == expected
    assert engine.stats["blocks_used"] == 0


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_a_draft_holds_no_token_that_is_never_said(drafter: str) -> None:
    """A prompt that repeats itself makes a drafter propose the token of an image, which has no logit."""
    given = {name: value[1:2] for name, value in batch().items()}
    ids = given["input_ids"]
    given["input_ids"] = torch.cat([ids, ids[:, :3], ids[:, :1]], dim=1)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    mask = given["cross_attention_mask"]
    given["cross_attention_mask"] = torch.cat([mask, mask[:, -1:].expand(-1, 4, -1, -1)], dim=1)
    model = hf_accel.patch(fresh(), weights=None, speculative=drafter)
    assert torch.equal(answer(model, given, max_new_tokens=24), answer(stock(), given, max_new_tokens=24))
    assert loop(model) == "ragged"


def test_images_without_a_mask_go_to_stock() -> None:
    """There, stock's sdpa shows each token other rows of them."""
    given = batch()
    del given["cross_attention_mask"]
    model = hf_accel.patch(fresh(), weights=None)
    with pytest.warns(hf_accel.HfAccelWarning, match="without a mask"):
        found = answer(model, given)
    assert torch.equal(found, answer(stock(), given))


def test_no_cache_of_pages_is_passed_along() -> None:
    model = hf_accel.patch(fresh(), weights=None)
    with pytest.raises(UnsupportedError, match=f"leave {CACHE_NAME}= out"):
        PagedCache(model.config)


class _OtherKeys(modeling_mllama.MllamaTextCrossAttention):
    """Its code is known, and its keys are not those that it stores: each pass turns them."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states * hidden_states.shape[1], *args, **kwargs)


def test_what_mixes_tokens_is_not_known() -> None:
    model = fresh()
    model.model.language_model.layers[1].cross_attn.__class__ = _OtherKeys
    expected = answer(model, batch())
    model = hf_accel.patch(model, weights=None)
    assert torch.equal(answer(model, batch()), expected)
    assert "paged" not in str(loop(model)) and loop(model) != "ragged"
