"""The table of options: each is a keyword of patch(), or a field of what a keyword takes, and says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_accel
from hf_accel.cli.options import PATCH_OPTIONS, Asked, PatchOption, texts_in_file
from hf_accel.cli.output import BadInputError, as_options
from hf_accel.config import CacheConfig, PatchConfig, SpeculativeConfig, WeightConfig

from .conftest import TINY

CONFIGS: dict[str, Any] = {"weights": WeightConfig, "cache": CacheConfig, "speculative": SpeculativeConfig}
LEFT_OUT = {  # fields without an option, and why
    "weights.format": "--weights fp8, --weights nf4",
    "weights.only_if_faster": "--weights auto",
    "weights.eight_bits": "--fit and --average-bits choose them",
    "cache.directory": "--cache-dir of serve",
    "cache.directory_bytes": "--cache-dir-bytes of serve",
    "speculative.drafter": "--speculative",
    "speculative.max_draft": "for programs",
    "speculative.max_nodes": "for programs",
    "speculative.verify": "for programs",
    "speculative.ngram": "for programs",
    "context_parallel": "for programs: it is a process group",
}


def asked(**given: Any) -> dict[str, Any]:
    output: Any = SimpleNamespace()
    return Asked(output, given).keywords()


def test_every_keyword_and_field_has_an_option() -> None:
    keywords = {field.name for field in dataclasses.fields(PatchConfig)} - {"explicit"} - LEFT_OUT.keys()
    assert {option.keyword for option in PATCH_OPTIONS} == keywords
    fields = {
        f"{name}.{field.name}" for name, kind in CONFIGS.items() for field in dataclasses.fields(kind) if field.init
    }
    options = {f"{option.keyword}.{option.field}" for option in PATCH_OPTIONS if option.field}
    assert fields - options == {name for name in LEFT_OUT if "." in name} and options <= fields


@pytest.mark.parametrize("option", [o for o in PATCH_OPTIONS if o.values], ids=lambda option: option.name)
def test_every_value_that_help_shows_is_taken(option: PatchOption) -> None:
    for value in option.values:
        beside = {"calibration": ["text"]} if value in ("gptq", "awq") else {}
        beside |= {"weights": "fp8"} if (option.name, value) == ("activations", "fp8") else {}
        PatchConfig.build(**asked(**{option.name: value}, **beside))


@pytest.mark.parametrize(
    ("given", "keywords"),
    [
        ({}, {}),
        ({"weights": "none"}, {"weights": None}),
        ({"weights": "int4", "group_size": 32}, {"weights": {"bits": 4, "group_size": 32}}),
        ({"bits": 3}, {"weights": {"bits": 3}}),
        ({"weights": "auto", "skip": ["lm_head"]},
         {"weights": {"bits": 8, "only_if_faster": True, "skip": ["lm_head"]}}),
        ({"weights": "nf4", "head": "none"}, {"weights": {"bits": 4, "format": "nf4", "head": None}}),
        ({"weights": "fp8", "activations": "fp8"},
         {"weights": {"bits": 8, "format": "fp8", "activations": "fp8"}}),
        ({"cache_dtype": "int8", "block_size": 32}, {"cache": {"dtype": "int8", "block_size": 32}}),
        ({"cache": "none", "fuse": False}, {"cache": None, "fuse": False}),
        ({"speculative": "suffix", "num_draft": 4}, {"speculative": {"drafter": "suffix", "num_draft": 4}}),
        ({"num_draft": 2}, {"speculative": {"drafter": "auto", "num_draft": 2}}),
        ({"keep_original": "no", "deterministic": True}, {"keep_original": False, "deterministic": True}),
    ],
)  # fmt: skip
def test_keywords(given: dict[str, Any], keywords: dict[str, Any]) -> None:
    assert asked(**given) == keywords
    PatchConfig.build(**keywords)


def test_nothing_to_set() -> None:
    with pytest.raises(BadInputError, match="--block-size with --cache none"):
        asked(cache="none", block_size=8)
    with pytest.raises(BadInputError, match="leave one of them out"):
        asked(weights="int4", bits=8)


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert texts_in_file(tmp_path / "a.txt") == ["one\ntwo\n"]
    assert texts_in_file(tmp_path / "a.jsonl") == ["one", "two"]
    assert asked(method="gptq", calibration=tmp_path / "a.jsonl")["weights"]["calibration"] == ["one", "two"]


def test_names_of_calibration_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is called so is the file."""
    monkeypatch.chdir(tmp_path)
    assert asked(method="gptq", calibration=Path("c4-new"))["weights"]["calibration"] == "c4-new"
    (tmp_path / "c4-new").write_text("one")
    assert asked(method="gptq", calibration=Path("c4-new"))["weights"]["calibration"] == ["one"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "No such file"),
        ("bytes.txt", b"\xff\xfe\xff", "UTF-8"),
        ("rows.jsonl", b'{"texts": "one"}\n', "key 'text'"),
        ("rows.jsonl", b"no json\n", "key 'text'"),
    ],
)
def test_texts_that_are_none(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        texts_in_file(tmp_path / name)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("weights='int3' is not known; one of None, 'int8'", "--weights int3 is not known; one of none, int8"),
        ("max_tokens=-1 must be", "--max-tokens -1 must be"),
        ("kv_dtype='x'; choose one of 'a', None or 'b', not 'c'", "--kv-dtype x; choose one of a, none or b, not 'c'"),
        ("give bandwidth= and compute=", "give --bandwidth and --compute"),
        ("calibration= is not read by method='rtn'", "--calibration is not read by --method rtn"),
        ("deterministic=True cannot be met; leave it out", "--deterministic cannot be met; leave it out"),
        ("leave attention= out, or pass attention=None", "leave --attention out, or pass --attention none"),
        ("patch with keep_original=True or False", "patch with --keep-original yes or False"),
        ("choose weights={'bits': 4}", "choose --bits 4"),
        ("or weights={'group_size': 64, 'skip': ['a', 'b']}", "or --group-size 64 --skip a --skip b"),
        ("weights={'symmetric': False, 'head': None}", "--no-symmetric --head none"),
        ("choose cache={'dtype': 'int8'}", "choose --cache-dtype int8"),
        ("weights={'calibration': tensor([1])}: no", "weights={'calibration': tensor([1])}: no"),
        ("average_bits=9 must be", "--average-bits 9 must be"),
        ("with format='nf4', bits=8 is not known", "with format='nf4', --bits 8 is not known"),
        ("temperature=2 is for other commands", "temperature=2 is for other commands"),
    ],
)  # fmt: skip
def test_messages_in_the_words_of_the_command_line(said: str, shown: str) -> None:
    options = [*(option.name for option in PATCH_OPTIONS), "kv_dtype", "bandwidth", "compute", "format"]
    assert as_options(said, options) == shown


def test_a_draft_head_is_loaded_for_its_target(tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(TINY)
    hf_accel.DraftHead.of(target).save_pretrained(tmp_path)
    saved = asked(speculative=str(tmp_path))["speculative"]
    model = hf_accel.patch(target, weights=None, speculative=SpeculativeConfig(drafter=saved, num_draft=2))
    assert saved == str(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert hf_accel.stats(model)["drafted"] > 0
