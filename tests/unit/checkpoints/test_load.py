"""hf_accel.load sorts its keywords: patch()'s, from_pretrained()'s, and bitsandbytes' old ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hf_accel
from hf_accel import PatchConfig, UnsupportedError, WeightConfig
from hf_accel.undo.state import state_of

from ...parity.families import build

SMALL = WeightConfig(4, group_size=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float")
    build("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, WeightConfig()),
        ({"load_in_8bit": True}, WeightConfig()),
        ({"load_in_4bit": False, "load_in_8bit": False, "weights": None}, None),
        ({"load_in_4bit": True}, WeightConfig(4)),
        ({"load_in_4bit": True, "weights": SMALL}, SMALL),
        ({"load_in_4bit": True, "config": PatchConfig(weights=SMALL)}, SMALL),
        ({"load_in_8bit": True, "config": PatchConfig(cache=None)}, WeightConfig()),
        ({"config": PatchConfig(weights=None)}, None),
    ],
)
def test_what_the_keywords_mean(folder: Path, keywords: dict[str, Any], expected: WeightConfig | None) -> None:
    model = hf_accel.load(folder, **keywords)
    settings = state_of(model).config
    assert settings.weights == expected
    assert (settings.cache is None) == ("config" in keywords and keywords["config"].cache is None)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"load_in_4bit": True, "weights": "int8"}, "load_in_4bit=True is weights='int4', and weights='int8' is not"),
        ({"load_in_8bit": True, "weights": None}, "load_in_8bit=True is weights='int8', and weights=None is not"),
        (
            {"load_in_8bit": True, "load_in_4bit": True},
            "load_in_8bit=True is weights='int8', and weights='int4' is not",
        ),
        ({"load_in_4bit": True, "config": PatchConfig(weights=None)}, "weights=None is not; leave one out"),
        ({"load_in_4bit": "yes"}, "load_in_4bit='yes' is not known; choose one of True, False"),
        (
            {"tokenizer": None},
            r"'tokenizer'; use transformers.AutoTokenizer.from_pretrained\('.*'\) for the tokenizer",
        ),
        ({"weight": "int4"}, r"load\(\) got an unknown keyword 'weight'; did you mean 'weights'"),
        ({"quantization_config": None}, "'quantization_config'; use weights='int8' or weights='int4'"),
        ({"kv_cache_dtype": "int8"}, r"'kv_cache_dtype'; use cache=\{'dtype': 'int8'\}"),
    ],
    ids=str,
)
def test_a_wrong_keyword_names_the_right_one(folder: Path, keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        hf_accel.load(folder, **keywords)


def test_the_tokenizer_of_a_gguf_file_is_in_it() -> None:
    from hf_accel.checkpoints.load import _tokenizer_call

    assert _tokenizer_call("models/a.gguf").endswith(".from_pretrained('models', gguf_file='a.gguf')")
