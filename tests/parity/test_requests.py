"""Engine.submit takes what a GenerationConfig says about tokens, and gives the tokens of generate()."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

import hf_accel
from hf_accel import Engine, UnsupportedError

from .families import VOCABULARY, build
from .speculating import requests

NEW_TOKENS = 14
PROMPTS = requests(4, seed=5)
WAIT = 30
SERVED: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [7, 8], [9, 10, 11]]},
    {"sequence_bias": [[[3], 4.0], [[6, 7], -8.0]]},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_no_repeat_ngram_size": 1},
    {"watermarking_config": WatermarkingConfig(bias=5.0)},
    {"suppress_tokens": list(range(4, 40))},
    {"begin_suppress_tokens": list(range(4, 60))},
    {"forced_eos_token_id": 3},
    {"min_length": 20, "eos_token_id": list(range(2, 40))},
    {"min_new_tokens": 5, "eos_token_id": list(range(2, 40))},
    {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 2},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "suppress_tokens": [4, 5], "remove_invalid_values": True},
]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    torch.manual_seed(1)
    yield hf_accel.patch(build("llama"), weights=None)


def generated(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, **settings
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SERVED, ids=lambda settings: "+".join(settings))
@pytest.mark.parametrize("speculative", [None, "ngram"])
def test_tokens_are_those_of_generate(model: Any, settings: dict[str, Any], speculative: str | None) -> None:
    plain = [generated(model, prompt) for prompt in PROMPTS]
    expected = [generated(model, prompt, **settings) for prompt in PROMPTS]
    assert expected != plain, "the setting has an effect"
    with Engine(model, speculative=speculative) as engine:
        asked = [engine.submit(prompt, max_new_tokens=NEW_TOKENS, **settings) for prompt in PROMPTS]
        assert [request.result(WAIT).tokens for request in asked] == expected
    outputs = model.generate_batch(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False, **settings)
    assert [output.generated_tokens for output in outputs.values()] == expected


@pytest.mark.parametrize("settings", SERVED, ids=lambda settings: "+".join(settings))
def test_settings_of_the_model_are_the_defaults(model: Any, settings: dict[str, Any]) -> None:
    expected = generated(model, PROMPTS[0], **settings)
    before = model.generation_config
    model.generation_config = GenerationConfig(**settings)
    try:
        with Engine(model) as engine:
            assert engine.submit(PROMPTS[0], max_new_tokens=NEW_TOKENS).result(WAIT).tokens == expected
        assert model.generation_config.to_dict() == GenerationConfig(**settings).to_dict()
    finally:
        model.generation_config = before


def test_sampling_that_only_transformers_has(model: Any) -> None:
    """typical_p and the like keep few tokens, so that the most probable ones remain."""
    with Engine(model) as engine:
        for settings in ({"epsilon_cutoff": 0.9}, {"top_k": 1}, {"typical_p": 1e-6}):
            sampled = engine.submit(PROMPTS[0], max_new_tokens=6, temperature=1.0, seed=1, **settings).result(WAIT)
            again = engine.submit(PROMPTS[0], max_new_tokens=6, do_sample=True, seed=2, **settings).result(WAIT)
            assert sampled.tokens == again.tokens, settings


def test_none_is_left_out_or_transformers_own_none(model: Any) -> None:
    before = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=list(range(2, 40)), repetition_penalty=1.5)
    try:
        ends, stock = generated(model, PROMPTS[0]), generated(model, PROMPTS[0], repetition_penalty=None)
        nothing = dict.fromkeys(("stop_token_ids", "bad_token_ids", "logit_bias", "processors", "logprobs", "stop"))
        with Engine(model) as engine:
            assert engine.submit(PROMPTS[0], max_new_tokens=NEW_TOKENS, **nothing).result(WAIT).tokens == ends
            free = engine.submit(PROMPTS[0], max_new_tokens=NEW_TOKENS, eos_token_id=None).result(WAIT).tokens
            assert len(free) == NEW_TOKENS > len(ends) and free[: len(ends)] == ends
            plain = engine.submit(PROMPTS[0], max_new_tokens=NEW_TOKENS, repetition_penalty=None).result(WAIT)
        assert plain.tokens == stock
    finally:
        model.generation_config = before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "num_beams=2; set it to 1, or use gen"),
        ({"num_return_sequences": 2}, "use n="),
        ({"max_length": 20}, "use max_new_tokens="),
        ({"logits_processor": []}, "use processors="),
        ({"do_sample": True, "temperature": 0}, "do_sample=True contradicts temperature=0.0"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample=False contradicts temperature=0.7"),
        ({"temperature": 1.0, "typical_p": -1.0}, "have no meaning: .*typical_p.* -1.0"),
        ({"bad_words_ids": [5]}, "the settings of this request have no meaning: .*bad_words_ids"),
        ({"no_repeat_ngram_size": -1.5, "sequence_bias": 3}, "the settings of this request have no meaning"),
        ({"suppress_tokens": "all"}, "the settings of this request have no meaning"),
        ({"stop_token_ids": 3, "eos_token_id": 3}, "stop_token_ids and eos_token_id say the same; give one of them"),
        ({"bad_token_ids": [VOCABULARY]}, f"bad_token_ids holds token ids .* 0 to {VOCABULARY - 1}"),
    ],
    ids=str,
)
def test_what_has_no_meaning(model: Any, settings: dict[str, Any], message: str) -> None:
    with Engine(model) as engine, pytest.raises(UnsupportedError, match=message):
        engine.submit(PROMPTS[0], **settings)


def test_a_model_that_searches_with_beams_by_default(model: Any) -> None:
    before = model.generation_config
    model.generation_config = GenerationConfig(num_beams=3)
    try:
        with Engine(model) as engine, pytest.raises(UnsupportedError, match=r"num_beams=3; set it to 1, or use gen"):
            engine.submit(PROMPTS[0])
    finally:
        model.generation_config = before


@pytest.mark.parametrize(
    "settings",
    [{"penalty_alpha": 0.6}, {"dola_layers": "low"}, {"force_words_ids": [[3]]}, {"token_healing": True}],
    ids=str,
)
def test_a_model_that_searches_otherwise_by_default(model: Any, settings: dict[str, Any]) -> None:
    """generate() asks for code of others to do it, or for a tokenizer, so greedy tokens would be others."""
    before = model.generation_config
    model.generation_config = GenerationConfig(**settings)
    message = f"{next(iter(settings))}=.*asks for more; set it to None, or use generate"
    try:
        with Engine(model) as engine, pytest.raises(UnsupportedError, match=message):
            engine.submit(PROMPTS[0])
        with pytest.raises(UnsupportedError, match=message):
            model.generate_batch(PROMPTS)
    finally:
        model.generation_config = before
