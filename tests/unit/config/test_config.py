from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

import hf_accel
from hf_accel import CacheConfig, PatchConfig, UnsupportedError, WeightConfig
from hf_accel.keywords import Default

NF4 = WeightConfig(4, format="nf4")


def test_defaults() -> None:
    config = PatchConfig.build()
    assert config.weights == WeightConfig(bits=8, activations="auto", head="int8")
    assert config.cache == CacheConfig(block_size=16, dtype="auto", max_tokens=None, prefix_sharing=True)
    assert (config.attention, config.keep_original, config.speculative) == ("auto", "auto", None)
    assert config.explicit == frozenset()


@pytest.mark.parametrize(
    ("word", "config"),
    [
        (None, None),
        ("int8", WeightConfig()),
        ("int4", WeightConfig(bits=4, group_size=128)),
        ("auto", WeightConfig(only_if_faster=True)),
        ({"bits": 4, "group_size": 32}, WeightConfig(bits=4, group_size=32)),
        ({"bits": 8, "group_size": None}, WeightConfig()),
        ({"bits": 4, "symmetric": False}, WeightConfig(bits=4, symmetric=False)),
        (WeightConfig(skip="lm_head"), WeightConfig(skip=("lm_head",))),
    ],
)
def test_weights(word: Any, config: WeightConfig | None) -> None:
    assert PatchConfig.build(weights=word).weights == config


@pytest.mark.parametrize("group_size", [32, 64, 128, None])
def test_groups_of_eight_bits(group_size: Any) -> None:
    config = WeightConfig(group_size=group_size)
    assert config.layout.group_size == group_size and config.for_head is not None
    assert config.for_head.layout.group_size is None
    four = WeightConfig(average_bits=5, method="gptq", group_size=group_size or 128)
    assert four.layout.group_size == (group_size or 128) and four.with_eight_bits().layout.group_size is None
    assert WeightConfig().group_size is WeightConfig(format="fp8").group_size is None


@pytest.mark.parametrize(
    ("word", "config"),
    [
        (None, None),
        ("paged", CacheConfig()),
        ({"dtype": "int8"}, CacheConfig(dtype="int8")),
        (CacheConfig(max_tokens=5), CacheConfig(max_tokens=5)),
    ],
)
def test_cache(word: Any, config: CacheConfig | None) -> None:
    assert PatchConfig.build(cache=word).cache == config


BAD: list[tuple[dict[str, Any], str]] = [
    ({"weight": "int8"}, r"unknown keyword 'weight'; did you mean 'weights'\?"),
    ({"attn": "sdpa"}, r"unknown keyword 'attn'"),
    ({"xyz": 1}, "unknown keyword 'xyz'; known are attention, cache"),
    ({"explicit": {"cache"}}, "unknown keyword 'explicit'"),
    ({"weights": "int99"}, "weights='int99' is not known; choose one of None, 'int8', 'int4', 'fp8', 'nf4', 'auto'"),
    ({"weights": True}, "weights=True is not known; choose one of None"),
    ({"weights": 48}, "weights=48 is not known; choose one of None"),
    ({"weights": "gguf"}, r"weights='gguf' is not known; use hf_accel.load\(path\)"),
    ({"weights": {"bits": 5}}, "bits=5 is not known; choose one of 8, 4, 3, 2"),
    ({"weights": "nvfp4"}, "weights='nvfp4' is not made here: .* choose weights={'bits': 4, 'group_size': 32}"),
    ({"weights": "llm.int8"}, r"weights='llm.int8' is not made here: .* BitsAndBytesConfig\(load_in_8bit=True\)"),
    ({"weights": {"format": "nvfp4"}}, "format='nvfp4' is not made here: .* Blackwell"),
    ({"weights": {"bits": True}}, "bits=True is not known"),
    ({"weights": {"bits": 4, "group_size": 48}}, "group_size=48 is not known; choose one of 32, 64, 128"),
    ({"weights": {"bits": 8, "group_size": 48}}, "group_size=48 is not known; choose one of 32, 64, 128, None"),
    ({"weights": {"bits": 4, "group_size": None}}, "group_size=None is not known; choose one of 32, 64, 128$"),
    ({"weights": {"format": "fp8", "group_size": 128}}, "with format='fp8', group_size=128 is not known; use None"),
    ({"weights": {"activations": "fp8"}}, "activations='fp8' is for FP8 weights; choose weights='fp8'"),
    ({"weights": {"head": "int3"}}, "head='int3' is not known"),
    ({"weights": {"symmetric": False}}, r"symmetric=False is for 4 bits or fewer, INT8 .* leave it True"),
    ({"weights": {"bits": 4, "symmetric": 0}}, "symmetric=0 is not known; choose one of True, False"),
    ({"speculative": {"num_draft": 0}}, "num_draft=0 must be an integer of at least 1; speculative=None is for no"),
    ({"weights": {"method": "hqq"}}, "method='hqq' is not known; choose one of 'rtn', 'gptq', 'awq'$"),
    ({"weights": {"calibration": ["text"]}}, "calibration= is not read by method='rtn'; leave it out, or choose"),
    ({"weights": {"method": "gptq", "resume": 3}}, "resume=3 must be the path of a folder"),
    ({"weights": {"resume": "folder"}}, "resume= is not read by method='rtn'"),
    (
        {"weights": {"average_bits": 4}},
        "average_bits=4 must be a number between 4 and 8, as 4.5; bits= is for one number",
    ),
    ({"weights": {"average_bits": "5"}}, "average_bits='5' must be a number between 4 and 8"),
    ({"weights": {"average_bits": True}}, "average_bits=True must be a number"),
    ({"weights": {"skip": [3]}}, "must hold module names"),
    ({"weights": {"skip": [""]}}, "must hold module names"),
    ({"weights": {"only_if_faster": 1}}, "only_if_faster=1 is not known"),
    ({"cache": "mamba"}, "cache='mamba' is not known; choose one of None, 'paged'"),
    ({"cache": "dynamic"}, "cache='dynamic' is not known; use cache=None"),
    ({"cache": {"dtype": 16}}, "cache dtype=16 is not known; use block_size=16"),
    ({"weights": {"bits": "int4"}}, r"bits='int4' is a word of weights=; pass weights='int4' to patch\(\)"),
    ({"cache": {"block_size": 0}}, "block_size=0 must be an integer of at least 1"),
    ({"cache": {"block_size": True}}, "block_size=True must be an integer"),
    ({"cache": {"block_size": 16.0}}, "block_size=16.0 must be an integer"),
    ({"cache": {"max_tokens": -5}}, "max_tokens=-5 must be an integer of at least 1"),
    (
        {"cache": {"dtype": "int2"}},
        "cache dtype='int2' is not known; choose one of 'auto', 'int8', 'fp8', 'int4', 'int8-int4'$",
    ),
    ({"cache": {"dtype": "int2"}}, "cache dtype='int2' is not known"),
    ({"cache": {"prefix_sharing": None}}, "prefix_sharing=None is not known"),
    ({"attention": 3}, "attention=3 must be 'auto', a backend's name or None"),
    ({"fuse": 1}, "fuse=1 is not known"),
    ({"keep_original": "yes"}, "keep_original='yes' is not known; choose one of 'auto', True, False"),
    (
        {"speculative": "medusa"},
        "drafter='medusa' is not known, and there is no such folder; choose one of 'auto', 'ngram'",
    ),
    ({"speculative": {"max_draft": 0}}, "max_draft=0 must be an integer of at least 1"),
    ({"speculative": {"num_draft": -1}}, "num_draft=-1 must be an integer of at least 1"),
    ({"speculative": {"verify": "typical"}}, "verify='typical' is not known; choose one of 'token', 'block'"),
    ({"speculative": {"ngram": (3, 2)}}, r"ngram=\(3, 2\) must be the fewest and the most tokens"),
    ({"speculative": []}, r"drafter=\[\] names none"),
    ({"config": "int8"}, "config='int8' must be a hf_accel.PatchConfig or a dict"),
    ({"config": {"weight": None}}, "did you mean 'weights'"),
]


@pytest.mark.parametrize(("keywords", "text"), BAD, ids=str)
def test_bad_value(keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        PatchConfig.build(**keywords)


@pytest.mark.parametrize("make", [WeightConfig, CacheConfig])
def test_unknown_setting_is_named(make: type) -> None:
    with pytest.raises(UnsupportedError, match=rf"{make.__name__} got an unknown keyword 'blok_size'"):
        make(blok_size=3)


def test_default_is_told_apart_from_the_same_word() -> None:
    default = PatchConfig.build(cache=Default("paged"))
    given = PatchConfig.build(cache="paged")
    assert default == given
    assert default.explicit == frozenset()
    assert given.explicit == {"cache"}


def test_keywords_override_config() -> None:
    base = PatchConfig.build(weights=None, cache=None, attention="sdpa")
    config = PatchConfig.build(base, weights="int4", attention=Default("auto"))
    assert config.weights == WeightConfig(bits=4)
    assert (config.cache, config.attention) == (None, "sdpa")
    assert config.explicit == {"weights", "cache", "attention"}


def test_to_dict_is_json_and_comes_back() -> None:
    config = PatchConfig.build(
        weights=WeightConfig(bits=4, symmetric=False, skip=["a", "b"]), cache={"dtype": "int8"}, attention="sdpa"
    )
    keywords = json.loads(json.dumps(config.to_dict()))
    assert PatchConfig.build(**keywords) == config
    assert PatchConfig.build(keywords) == config


@pytest.mark.parametrize("config", [PatchConfig(), WeightConfig(), CacheConfig()])
def test_frozen(config: Any) -> None:
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, None)
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize(("kind", "name", "value"), [(WeightConfig, "bits", 4), (CacheConfig, "dtype", "int8")])
def test_one_setting_needs_no_name(kind: Any, name: str, value: object) -> None:
    assert kind(value) == kind(**{name: value}) != kind()
    with pytest.raises(
        UnsupportedError, match=f"{kind.__name__} takes {name} without a name, and the others with the"
    ):
        kind(value, 32)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("awq gptq AWQ", [WeightConfig(4, method="awq"), WeightConfig(4, method="gptq")]),
        ("q4 Q4_K_M Q4_0 iq4_xs 4bit 4-bit uint4 int4_asym w4a16 bnb-4bit", [WeightConfig(4), NF4]),
        ("q8 Q8_0 8bit w8a8 int8_dynamic load_in_8bit Q6_K q5_1", [WeightConfig()]),
        ("nf4-dq nf4_dq fp4 bnb bitsandbytes", [NF4]),
        ("fp8_e4m3 float8 float8_e4m3fn f8", [WeightConfig(format="fp8")]),
        ("int3 3bit 3 int2 2 Q2_K q3_k_s", [WeightConfig(3), WeightConfig(2)]),
        ("none bf16 bfloat16 float16 fp16 float32 half", [None]),
    ],
)
def test_what_is_proposed_for_a_word_of_others_is_taken(words: str, expected: list[WeightConfig | None]) -> None:
    for word in words.split():
        value = int(word) if word.isdigit() else word
        with pytest.raises(UnsupportedError, match=rf"weights={value!r} is not known; use weights=") as raised:
            PatchConfig.build(weights=value)
        call = f"dict({re.split(', or ', str(raised.value).partition('; use ')[2])[0]})"
        proposed = eval(call, {"hf_accel": hf_accel, "texts": ["text"]})  # the message is ours
        assert PatchConfig.build(**proposed).weights in expected, word


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_what_is_proposed_for_a_cache_is_taken(dtype: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"use cache=hf_accel.CacheConfig\('{dtype}'\)"):
        PatchConfig.build(cache=dtype)
    assert CacheConfig(dtype).dtype == dtype  # type: ignore[arg-type]
