"""A keyword that is not known says which one is meant, wherever it is given."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import hf_accel
from hf_accel import UnsupportedError
from hf_accel.config import PatchConfig
from hf_accel.keywords import MEANT_BY_PATCH, checked_keywords
from tests.parity.families import build

UNKNOWN: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (hf_accel.patch, {"load_in_4bit": True}, r"patch\(\) got an unknown keyword 'load_in_4bit'; use weights='int4'"),
    (hf_accel.patch, {"load_in_8bit": True}, r"use weights='int8'"),
    (hf_accel.patch, {"bits": 4}, r"'bits'; use weights='int8' or weights='int4'"),
    (hf_accel.patch, {"quantization_config": None}, r"use weights='int8' or weights='int4'"),
    (hf_accel.patch, {"kv_dtype": "int8"}, r"use cache=\{'dtype': 'int8'\}"),
    (hf_accel.patch, {"dtype": torch.bfloat16}, r"'dtype'; use cache=\{'dtype': 'int8'\} for keys and values"),
    (hf_accel.AccelConfig, {"weight": "int8"}, r"AccelConfig got an unknown keyword 'weight'; did you mean 'weights'"),
    (hf_accel.AccelConfig, {"load_in_4bit": True}, r"use weights='int4'"),
    (hf_accel.PatchConfig, {"atention": None}, r"PatchConfig got an unknown keyword 'atention'; did you mean 'att"),
    (
        hf_accel.WeightConfig,
        {"groupsize": 64},
        r"WeightConfig got an unknown keyword 'groupsize'; did you mean 'gr",
    ),
    (hf_accel.WeightConfig, {"load_in_4bit": True}, r"'load_in_4bit'; use bits=4"),
    (hf_accel.CacheConfig, {"max_token": 9}, r"CacheConfig got an unknown keyword 'max_token'; did you mean 'max_to"),
    (hf_accel.CacheConfig, {"kv_dtype": "int8"}, r"'kv_dtype'; use dtype="),
    (hf_accel.PagedCache, {"max_cache_len": 9}, r"PagedCache got an unknown keyword 'max_cache_len'; use max_tokens="),
    (hf_accel.PagedCache, {"capacty": 9}, r"did you mean 'capacity'"),
    (
        hf_accel.SpeculativeConfig,
        {"max_drafts": 9},
        r"SpeculativeConfig got .*; did you mean 'max_draft'",
    ),
    (hf_accel.SpeculativeConfig, {"assistant_model": None}, r"'assistant_model'; use drafter="),
    (hf_accel.Engine, {"max_token": 9}, r"Engine got an unknown keyword 'max_token'; did you mean 'max_tokens'"),
    (hf_accel.DistillationCallback, {"temprature": 2.0}, r"DistillationCallback got .*; did you mean 'temperature'"),
    (
        hf_accel.DistillationSettings,
        {"lambda_": 0.5},
        r"DistillationSettings got .*; did you mean 'lmbda'",
    ),
    (hf_accel.DistillationConfig, {"lerning_rate": 0.5}, r"DistillationConfig got .*; did you mean 'learning_rate'"),
    (hf_accel.TeacherCache.build, {"temperature": 2.0}, r"TeacherCache.build\(\) got .*; use temperatures="),
    (
        hf_accel.estimate,
        {"kv_type": "int8"},
        r"estimate\(\) got .*; did you mean 'kv_dtype'",
    ),
    (hf_accel.init_student, {"n_layers": 2}, r"init_student\(\) got .*; did you mean 'num_layers'"),
    (hf_accel.measure_acceptance, {"maxdraft": 2}, r"measure_acceptance\(\) got .*; did you mean 'max_draft'"),
    (hf_accel.distill_draft, {"max_step": 2}, r"distill_draft\(\) got .*; did you mean 'max_steps'"),
    (hf_accel.distillation_loss, {"temp": 2}, r"distillation_loss\(\) got .*; did you mean 'temperature'"),
]


@pytest.mark.parametrize(("call", "keywords", "text"), UNKNOWN)
def test_an_unknown_keyword_names_the_right_one(call: Callable[..., Any], keywords: dict[str, Any], text: str) -> None:
    """Before anything else is looked at: the other arguments are missing or none."""
    needed = [
        p.name
        for p in inspect.signature(call).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    with pytest.raises(UnsupportedError, match=text):
        call(**dict.fromkeys(needed), **keywords)


@pytest.mark.parametrize("hint", sorted({h for h in MEANT_BY_PATCH.values() if "={" in h or "='" in h}))
def test_what_patch_proposes_is_taken(hint: str) -> None:
    """The words before a comma, "or" or "for" are keywords that can be passed as they stand."""
    call = ast.parse(f"f({re.split(', w|, o| or | for ', hint)[0]})", mode="eval").body
    assert isinstance(call, ast.Call)
    keywords = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    assert keywords and PatchConfig.build(**keywords).explicit == set(keywords)


@pytest.mark.parametrize(
    ("call", "given", "keywords", "text"),
    [
        (hf_accel.estimate, [None, 4096], {}, r"estimate\(\) takes model without a name, and the others .*: context="),
        (hf_accel.estimate, [], {"context": 9}, r"estimate\(\) needs model="),
        (hf_accel.patch, [None, "int8"], {}, r"patch\(\) takes model without a name, and the others .*: weights="),
        (hf_accel.plan, [None, "int8"], {}, r"plan\(\) takes model without a name, and the others .* weights="),
        (hf_accel.load, ["path", "int8"], {}, r"load\(\) takes path without a name, and the others .*: weights="),
        (hf_accel.Engine, [None, None, 9], {}, "Engine takes model and tokenizer without a name, .*: max_tokens="),
        (hf_accel.SpeculativeConfig, ["ngram"], {}, "SpeculativeConfig takes nothing without a name, .*: drafter="),
    ],
)
def test_what_needs_a_name_is_said(
    call: Callable[..., Any], given: list[Any], keywords: dict[str, Any], text: str
) -> None:
    with pytest.raises(UnsupportedError, match=text):
        call(*given, **keywords)


def test_the_signature_stays() -> None:
    assert list(inspect.signature(hf_accel.CacheConfig).parameters) == [
        "dtype", "block_size", "max_tokens", "prefix_sharing", "directory", "directory_bytes"
    ]  # fmt: skip
    with pytest.raises(AssertionError):
        checked_keywords()(lambda **anything: None)


def test_a_config_of_a_user_takes_the_keywords_of_both() -> None:
    """A dataclass that DistillationSettings is mixed into has an __init__ of its own."""

    @dataclasses.dataclass
    class Both(hf_accel.DistillationSettings, TrainingArguments):
        pass

    both = Both(output_dir="out", alpha=0.25, learning_rate=1e-3)
    assert (both.alpha, both.learning_rate) == (0.25, 1e-3)


def test_of_a_model() -> None:
    model = build("llama")
    with pytest.raises(UnsupportedError, match="use weights='int4'"):
        hf_accel.patch(model, load_in_4bit=True)
    assert not hf_accel.is_patched(model)
