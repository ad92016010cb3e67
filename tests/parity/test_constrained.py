"""Texts that must match something: the tokens are those of transformers' loop with a processor that looks at each
position anew, whatever else runs, whether drafts are made or not."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

import hf_accel
from hf_accel import Engine, SpeculativeConfig, UnsupportedError

from ..serving.running import SHIPPED

llguidance = pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,9}$"},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 40}, "maxItems": 4},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
NUMBER = "[0-9]{3}-[a-f]{2,6}"
WORDS = ["import re\n\ndef ", "x", "class Reader:\n    def "]
MANY = 120  # tokens are enough for each


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def model() -> Any:
    made = hf_accel.load(str(SHIPPED), weights=None, dtype=torch.float32)
    yield made
    hf_accel.unpatch(made)


class Anew(LogitsProcessor):
    """Compiles the grammar for each position and reads the whole answer, as nothing of ours does."""

    def __init__(self, tokenizer: Any, grammar: str, begin: int) -> None:
        self.tokenizer = llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=tokenizer.eos_token_id)
        self.grammar, self.begin = grammar, begin

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        matcher = llguidance.LLMatcher(self.tokenizer, self.grammar)
        assert matcher.consume_tokens(input_ids[0, self.begin :].tolist()) or matcher.is_stopped()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return scores.masked_fill(torch.from_numpy(bits[: scores.shape[1]] == 0), -torch.inf)


def grammar_of(asked: dict[str, Any]) -> str:
    if "regex" in asked:
        return str(llguidance.grammar_from("regex", asked["regex"]))
    given = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return str(llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides=given))


@pytest.fixture(scope="module")
def stock(tokenizer: Any) -> dict[tuple[str, str], list[int]]:
    """Return the greedy answers of transformers, without the token that ends them."""
    plain = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    found = {}
    for words in WORDS:
        ids = tokenizer(words, return_tensors="pt")
        for name, asked in ASKED.items():
            begin = ids["input_ids"].shape[1]
            rules = LogitsProcessorList([Anew(tokenizer, grammar_of(asked), begin)])
            out = plain.generate(**ids, do_sample=False, max_new_tokens=MANY, logits_processor=rules)[
                0, begin:
            ].tolist()
            found[words, name] = out[:-1] if out[-1] == tokenizer.eos_token_id else out
    return found


ASKED: dict[str, dict[str, Any]] = {"schema": {"response_format": FORMAT}, "regex": {"regex": NUMBER}}
DRAFTS: dict[str, Any] = {
    "forced alone": None,
    "ngram": SpeculativeConfig(drafter="ngram", num_draft=3),
    "its own INT4 form": SpeculativeConfig(drafter="self-int4", num_draft=3),
    "seeded": SpeculativeConfig(drafter="self-int4", num_draft=2, verify="seeded"),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("max_tokens", [None, 128], ids=["all at once", "preempted"])
def test_engine_gives_the_tokens_of_stock(
    model: Any, tokenizer: Any, stock: Any, drafts: str, max_tokens: int | None
) -> None:
    """Beside them run others, without a constraint and with several samples."""
    with Engine(model, tokenizer=tokenizer, speculative=DRAFTS[drafts], max_tokens=max_tokens) as engine:
        engine.loop.start()
        with engine.loop.pause():  # so that all begin together, and not all have room to grow
            plain = engine.submit(WORDS[1], max_new_tokens=110, temperature=0)
            asked = [(key, ASKED[key[1]]) for key in stock]
            requests = {key: engine.submit(key[0], max_new_tokens=MANY, temperature=0, **more) for key, more in asked}
            samples = engine.submit(WORDS[1], max_new_tokens=MANY, temperature=1, seed=4, n=8, **ASKED["schema"])
        for key, expected in stock.items():
            answer = requests[key].result()
            tokens = answer.tokens[:-1] if answer.tokens[-1] == tokenizer.eos_token_id else answer.tokens
            assert (tokens, answer.finish_reason) == (expected, "stop")
        assert len(plain.result().tokens) == 110
        texts = [sample.text for sample in samples.results()]
        assert len(set(texts)) > 1
        for text in texts:
            jsonschema.validate(json.loads(text or ""), SCHEMA)
        statistics = engine.stats
        assert statistics["speculation"]["accepted"] > 0
        assert (statistics["preemptions"] > 0) == (max_tokens is not None)


def test_the_token_that_ends_an_answer_is_no_part_of_its_text(model: Any, tokenizer: Any) -> None:
    """More may follow "ab", so that the end of the text is chosen, and not foreseen."""
    with Engine(model, tokenizer=tokenizer) as engine:
        bias = {tokenizer.eos_token_id: 100.0}
        result = engine.submit(WORDS[0], regex="ab(cd)?", logit_bias=bias, temperature=0, max_new_tokens=9).result()
    assert (result.finish_reason, result.tokens[-1], result.text) == ("stop", tokenizer.eos_token_id, "ab")


@pytest.mark.parametrize("drafts", ["forced alone", "ngram", "seeded"])
def test_a_seed_gives_the_same_sample_with_drafts(model: Any, tokenizer: Any, drafts: str) -> None:
    given: dict[str, Any] = {"max_new_tokens": MANY, "temperature": 1.0, "top_p": 0.95, **ASKED["schema"]}
    found = []
    for speculative in (DRAFTS[drafts], SpeculativeConfig(drafter="ngram", num_draft=7)):
        with Engine(model, tokenizer=tokenizer, speculative=speculative) as engine:
            found.append([engine.submit(words, seed=3, **given).result().text for words in WORDS])
    assert found[0] == found[1] or drafts == "seeded"  # a draft model's are equal only to seeded ones
    for text in found[0]:
        jsonschema.validate(json.loads(text or ""), SCHEMA)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize(
    "more", [{}, {"speculative": "ngram"}, {"return_dict_in_generate": True, "output_scores": True}]
)
def test_generate_of_several_rows(model: Any, tokenizer: Any, stock: Any, name: str, more: dict[str, Any]) -> None:
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    rows = tokenizer(WORDS, return_tensors="pt", padding=True)
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": MANY, "tokenizer": tokenizer, **ASKED[name], **more}
    out = model.generate(**rows, **given)
    for words, row in zip(
        WORDS, getattr(out, "sequences", out)[:, rows["input_ids"].shape[1] :].tolist(), strict=True
    ):
        expected = stock[words, name]
        assert row[: len(expected)] == expected and set(row[len(expected) :]) <= {tokenizer.pad_token_id}
    assert hf_accel.stats(model)["loop"] == "ragged"


def test_beams_and_samples(model: Any, tokenizer: Any) -> None:
    rows = tokenizer(WORDS[0], return_tensors="pt")
    given: dict[str, Any] = {"max_new_tokens": MANY, "tokenizer": tokenizer, "num_return_sequences": 3}
    begin = rows["input_ids"].shape[1]
    for more in ({"num_beams": 4, "do_sample": False}, {"do_sample": True, "temperature": 1.0}):
        out = model.generate(**rows, **given, **more, **ASKED["regex"])[:, begin:]
        for text in tokenizer.batch_decode(out, skip_special_tokens=True):
            assert re.fullmatch(NUMBER, text), (text, more)


def test_transformers_own_loop(tokenizer: Any) -> None:
    """Where a model cannot run ragged, a processor does the same."""
    model = hf_accel.load(str(SHIPPED), weights=None, dtype=torch.float32, cache=None)
    rows = tokenizer(WORDS[:2], return_tensors="pt", padding=True)
    out = model.generate(**rows, max_new_tokens=60, do_sample=False, tokenizer=tokenizer, regex=NUMBER)
    assert hf_accel.stats(model)["loop"] != "ragged"
    for text in tokenizer.batch_decode(out[:, rows["input_ids"].shape[1] :], skip_special_tokens=True):
        assert re.fullmatch(NUMBER, text)


def test_generate_batch(model: Any, tokenizer: Any, stock: Any) -> None:
    ids = [tokenizer(words)["input_ids"] for words in WORDS]
    out = model.generate_batch(ids, max_new_tokens=MANY, do_sample=False, tokenizer=tokenizer, **ASKED["schema"])
    for words, output in zip(WORDS, out.values(), strict=True):
        tokens = output.generated_tokens
        tokens = tokens[:-1] if tokens[-1] == tokenizer.eos_token_id else tokens
        assert output.error is None and tokens == stock[words, "schema"]


def test_forced_tokens_are_drafted(model: Any, tokenizer: Any) -> None:
    long = {"type": "object", "properties": {f"a rather long name {n}": {"enum": [n]} for n in range(6)}}
    long |= {"required": list(long["properties"]), "additionalProperties": False}
    with Engine(model, tokenizer=tokenizer, speculative=None) as engine:
        asked = {"type": "json_schema", "json_schema": {"schema": long}}
        answer = engine.submit(WORDS[1], max_new_tokens=200, temperature=0, response_format=asked).result()
        statistics = engine.stats
    assert json.loads(answer.text or "") == {name: value["enum"][0] for name, value in long["properties"].items()}
    assert statistics["passes"] < len(answer.tokens) / 2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"regex": "["}, "unclosed character class"),
        ({"regex": "a", "choice": ["b"]}, "regex= and choice="),
        ({"choice": []}, "at least one"),
        ({"response_format": {"type": "json"}}, "must be"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
            "uniqueItems",
        ),
        ({"grammar": "start: missing"}, "missing"),
    ],
    ids=str,
)
def test_what_cannot_be_matched(model: Any, tokenizer: Any, asked: dict[str, Any], words: str) -> None:
    with Engine(model, tokenizer=tokenizer) as engine, pytest.raises(UnsupportedError, match=re.escape(words)):
        engine.submit("x", **asked)
    with Engine(model) as engine, pytest.raises(UnsupportedError, match="tokenizer="):
        engine.submit([1], regex="a")


def test_a_missing_package(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"pip install \"hf_accel\[structured\]\""):
        model.generate(torch.tensor([[1]]), regex="a", tokenizer=AutoTokenizer.from_pretrained(SHIPPED))
