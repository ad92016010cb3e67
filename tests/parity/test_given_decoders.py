"""A decoder that is given rows to attend to by the code around it (BLIP) runs as that of an encoder-decoder."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.blip.modeling_blip_text import BlipTextSelfAttention

import hf_accel
from hf_accel import CacheConfig, Engine, UnsupportedError

from .snapshot import snapshot

WAIT, NEW_TOKENS, BEGIN, END = 60, 8, 3, 2
TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": BEGIN, "eos_token_id": END,
        "sep_token_id": 9, "pad_token_id": 0, "projection_dim": 16}  # fmt: skip
VISION = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 16, "patch_size": 8}  # fmt: skip
CAPTIONS, ANSWERS = "BlipForConditionalGeneration", "BlipForQuestionAnswering"
IDS = torch.tensor([[BEGIN, 11, 40, 7, 9], [BEGIN, 11, 40, 7, 9], [0, 0, BEGIN, 5, 9]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
CALLS: list[dict[str, Any]] = [
    {"do_sample": False}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 2},
    {"do_sample": False, "repetition_penalty": 1.5},
]  # fmt: skip


def fresh(name: str) -> Any:
    width = 24 if name == CAPTIONS else TEXT["hidden_size"]  # of what the decoder is given: images, or a question
    text, vision = TEXT | {"encoder_hidden_size": width}, VISION | {"hidden_size": width}
    config = transformers.BlipConfig(text_config=text, vision_config=vision)
    model = getattr(transformers, name)(config).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            if "crossattention" in key and parameter.ndim > 1:
                parameter.mul_(2)  # so that an image changes tokens, and not only logits
    return model


@cache
def stock(name: str) -> Any:
    return fresh(name)


def given(name: str) -> dict[str, Tensor]:
    images = 2 * torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": images, "input_ids": IDS.clone(), "attention_mask": MASK}


def row_of(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    kept = MASK[row].bool()
    return {
        name: value[row, None] if name == "pixel_values" else value[row, None, kept] for name, value in batch.items()
    }


def loop(model: Any) -> str:
    return str(hf_accel.stats(model)["loop"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [CAPTIONS, ANSWERS])
@pytest.mark.parametrize("settings", CALLS, ids=str)
def test_a_batch_of_images(name: str, settings: dict[str, Any]) -> None:
    """One row is shorter, and stands behind padding."""
    model, results = hf_accel.patch(fresh(name), weights=None, cache=CacheConfig(block_size=2)), []
    for each in (stock(name), model):
        torch.manual_seed(0)
        results.append(each.generate(**given(name), max_new_tokens=NEW_TOKENS, **settings))
    assert torch.equal(*results)
    assert loop(model) == "ragged"
    if settings == CALLS[0]:
        assert not torch.equal(results[0][0], results[0][1])  # the image matters


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [CAPTIONS, ANSWERS])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_requests_together_give_the_tokens_of_each_alone(name: str, weights: str | None) -> None:
    """Two images stand behind the same words, and a request goes on as its model's generate() ends it."""
    batch, model = given(name), hf_accel.patch(fresh(name), weights=weights)
    asked = [row_of(batch, row) for row in (0, 1, 2, 0)]
    plain = stock(name) if weights is None else model
    expected = [plain.generate(**each, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist() for each in asked]
    with Engine(model) as engine:
        requests = [engine.submit(each, max_new_tokens=NEW_TOKENS, temperature=0) for each in asked]
        answers = [request.result(WAIT).tokens for request in requests]
    assert [tokens[-len(answer) :] for tokens, answer in zip(expected, answers, strict=True)] == answers
    assert all(len(answer) == NEW_TOKENS or answer[-1] == 9 for answer in answers)
    assert answers[0] == answers[3] != answers[1]


def test_what_is_refused() -> None:
    batch, model = given(CAPTIONS), hf_accel.patch(fresh(CAPTIONS), weights=None)
    with Engine(model) as engine:
        with pytest.raises(UnsupportedError, match="refuses this prompt: "):
            engine.submit([BEGIN, 5, 7])
        with pytest.raises(UnsupportedError, match="rows of"):
            engine.submit({"pixel_values": batch["pixel_values"]})
        words = engine.submit({"pixel_values": batch["pixel_values"][:1]}, max_new_tokens=4, temperature=0)
        alone = stock(CAPTIONS).generate(pixel_values=batch["pixel_values"][:1], max_new_tokens=4, do_sample=False)
        assert words.result(WAIT).tokens == alone[0, 1:].tolist()
    with pytest.raises(UnsupportedError, match="sets eos_token_id= by itself"):
        model.generate_batch([row_of(batch, 0)])
    with pytest.raises(UnsupportedError, match="cannot hold what BlipTextLMHeadModel attends to besides tokens"):
        cache = hf_accel.PagedCache(model.text_decoder.config)
        model.generate(**batch, past_key_values=cache, max_new_tokens=2)


def test_the_decoder_without_rows_runs_transformers_loop() -> None:
    plain, model = stock(CAPTIONS), hf_accel.patch(fresh(CAPTIONS), weights=None)
    ids, settings = IDS[:2, :3], {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    wanted = plain.text_decoder.generate(ids, **settings)
    assert torch.equal(model.text_decoder.generate(ids, **settings), wanted)


def test_a_decoder_that_attends_otherwise_stays_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the code of a layer does with rows is not known by its name, but tried."""
    own = BlipTextSelfAttention.forward

    def reversed_rows(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = kwargs.get("encoder_hidden_states")
        if rows is not None:
            kwargs["encoder_hidden_states"] = rows - rows.mean(dim=1, keepdim=True)  # of all sequences of a pass
        return own(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(BlipTextSelfAttention, "forward", reversed_rows)
    model = fresh(CAPTIONS)
    wanted = model.generate(**given(CAPTIONS), max_new_tokens=NEW_TOKENS, do_sample=False)
    hf_accel.patch(model, weights=None)
    assert torch.equal(model.generate(**given(CAPTIONS), max_new_tokens=NEW_TOKENS, do_sample=False), wanted)
    assert loop(model) != "ragged"
    with pytest.raises(UnsupportedError, match="an Engine cannot serve this model"):
        Engine(model)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_unpatch_leaves_nothing(weights: str | None) -> None:
    model, batch = fresh(CAPTIONS), given(CAPTIONS)
    before = snapshot(model, batch)
    hf_accel.patch(model, weights=weights)
    model.generate(**given(CAPTIONS), max_new_tokens=2, do_sample=False)
    hf_accel.unpatch(model)
    assert snapshot(model, batch) == before
