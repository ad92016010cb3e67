"""The package calls transformers' models and layers by the name that a cache has in this release: a deprecated one
brings its user a warning at each call, and where the package looks for one, it finds no cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, Lfm2Config, Lfm2ForCausalLM

import hf_accel
from hf_accel.cache.hf.cache_argument import CACHE_NAME, CACHE_NAMES, cache_name
from hf_accel.verify.cost import predictions

from .families import DECODER, VOCABULARY, build
from .recurrent_models import delta_rule_of, gated_unit_of, matrix_memory_of, state_space_of

IDS = torch.tensor([[5, 9, 23, 40, 7], [8, 2, 61, 3, 90]])
LAYERS = ["linear_attention", "full_attention"]


def bart() -> Any:
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, pad_token_id=0,
        eos_token_id=None, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


def lfm2() -> Any:
    return Lfm2ForCausalLM(Lfm2Config(**DECODER, layer_types=["conv", "full_attention"])).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: build("llama"),
    "gpt2": lambda: build("gpt2"),
    "bart": bart,
    "convolutions": lfm2,
    "delta rule": lambda: delta_rule_of("next", LAYERS, tokens=64, repeats=1),
    "mamba": lambda: state_space_of("mamba", LAYERS, tokens=64, repeats=1),
    "bamba": lambda: state_space_of("bamba", LAYERS, tokens=64, repeats=1),
    "lightning": lambda: state_space_of("minimax", LAYERS, tokens=64, repeats=1),
    "gated units": lambda: gated_unit_of(["recurrent", "attention"], tokens=64),
    "matrix memories": matrix_memory_of,
}


@pytest.mark.parametrize("kind", MODELS)
def test_no_deprecated_name_is_used(kind: str) -> None:
    model = MODELS[kind]()
    # Transformers has no beams for a cache of its own class.
    settings = [each for each in SETTINGS if kind != "matrix memories" or "num_beams" not in each]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`(past_key_values|cache_params)` is deprecated", FutureWarning)
        expected = [model.generate(IDS, max_new_tokens=6, **own) for own in settings]
        hf_accel.patch(model, weights=None)
        answers = [model.generate(IDS, max_new_tokens=6, **own) for own in settings]
        loop = hf_accel.stats(model)["loop"]
        list(predictions(model, IDS[:1]))
        hf_accel.unpatch(model)
    assert all(map(torch.equal, answers, expected))
    assert loop == "ragged"


SETTINGS: list[dict[str, Any]] = [{"do_sample": False, "num_beams": 2}, {"do_sample": False}]


@pytest.mark.parametrize("kind", MODELS)
def test_the_name_is_that_of_the_models_own_code(kind: str) -> None:
    model = MODELS[kind]()
    name = cache_name(model)
    assert name in CACHE_NAMES
    seen: list[object] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs.get(name)), with_kwargs=True)
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert seen[1] is not None  # which transformers' own loop gives the model behind the prompt


def test_a_dict_holds_the_cache_by_the_name_of_stocks() -> None:
    model = build("llama")
    settings: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(IDS, **settings)
    found = hf_accel.patch(model, weights=None).generate(IDS, **settings)
    assert found.keys() == expected.keys() and CACHE_NAME in found.keys()  # noqa: SIM118
    assert isinstance(expected[CACHE_NAME], DynamicCache)
