"""Encoders, models of images and of sound, and encoder-decoders: each command works, or says what it is for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from .conftest import TINY, Run, one_line

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "vocab_size": 2048, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = T5Config(
    vocab_size=2048, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0,
)  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "encoder": lambda: BertModel(BertConfig(vocab_size=2048, **SIZES)),
    "classifier": lambda: BertForSequenceClassification(BertConfig(vocab_size=2048, **SIZES)),
    "images": lambda: ViTForImageClassification(ViTConfig(image_size=32, **SIZES)),
    "text to text": lambda: T5ForConditionalGeneration(T5),
    "sound to text": lambda: WhisperForConditionalGeneration(WhisperConfig(**WHISPER)),
}
GENERATES_NOT = "does not generate text; hf-accel plan, bench, verify and quantize take it"
TWO_CLASSES = "chooses among 2 classes; a score needs a head of one"
NO_EXTRACTOR = "holds cannot be loaded: Can't load feature extractor"  # the tests of the server serve one with it
FROM_SOUND = "starts from input_features and not from a text"
COMMANDS: dict[str, list[object]] = {
    "plan": [],
    "estimate": ["--context", 64, "--bandwidth", "1e9"],
    "bench": ["--context", 8, "--batch", 3, "--rounds", 1],
    "generate": ["--prompt", "x", "--max-new-tokens", 2],
    "verify": ["--max-new-tokens", 2],
    "serve": ["--port", 0],
}
# What is said on stdout, or else in the one line on stderr. verify of an encoder-decoder is not tried here.
PASSES = {"plan": "a pass", "estimate": "a pass", "bench": "cosine", "verify": "against float"}
REFUSED = {"generate": GENERATES_NOT}
SAID: dict[str, dict[str, str]] = {
    "encoder": PASSES | REFUSED,  # the tests of the server serve one
    "classifier": PASSES | REFUSED | {"serve": TWO_CLASSES},
    "images": PASSES | REFUSED | {"serve": GENERATES_NOT},
    "text to text": {
        "plan": "decode", "estimate": "decode", "bench": "decode", "generate": "\n",
    },
    "sound to text": {
        "plan": "decode", "estimate": "decode", "bench": FROM_SOUND, "generate": FROM_SOUND,
        "verify": FROM_SOUND, "serve": NO_EXTRACTOR,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found, tokenizer = {}, AutoTokenizer.from_pretrained(TINY)
    for name, make in MODELS.items():
        found[name] = tmp_path_factory.mktemp("model")
        make().save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


@pytest.mark.parametrize(("name", "command"), [(name, command) for name, said in SAID.items() for command in said])
def test_each_command(run: Run, folders: dict[str, Path], name: str, command: str) -> None:
    result, said = run(command, folders[name], *COMMANDS[command]), SAID[name][command]
    if said in (TWO_CLASSES, NO_EXTRACTOR):
        assert said in one_line(result)
    elif said in (GENERATES_NOT, FROM_SOUND):
        line = one_line(result)
        assert said in line and type(MODELS[name]()).__name__ in line
    else:
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        assert said in result.stdout and ("decode" in result.stdout) == (said == "decode")


def test_the_rows_of_an_encoder(run: Run, folders: dict[str, Path]) -> None:
    words = ["--context", 8, "--batch", 3, "--rounds", 2, "--weights", "none", "--json"]
    document = json.loads(run("bench", folders["encoder"], *words).stdout)
    assert document["topic"] == "encode"
    assert [row["what"] for row in document["rows"]] == [
        what for what in ("one input", "3 of one length", "3 of 1 to 8") for _ in range(2)
    ]
    for row in document["rows"]:
        assert row["cosine"] > 0.99999 and row["seconds"] > 0 and row["per_second"] > 0
    images = json.loads(run("bench", "encode", folders["images"], *words).stdout)
    assert {row["what"] for row in images["rows"]} == {"one input", "3 of one length"}
    assert "is for encoders" in one_line(run("bench", "encode", TINY))


def test_what_an_estimate_of_an_encoder_lacks(run: Run, folders: dict[str, Path]) -> None:
    words = [folders["encoder"], "--bandwidth", "1e9"]
    found = json.loads(run("estimate", *words, "--json").stdout)
    assert found["kv_bytes"] == 0 and found["seconds_per_token"] is None and found["prefill_seconds"] > 0
    assert "is an encoder" in one_line(run("estimate", *words, "--requests-per-second", 1))


@pytest.mark.parametrize("topic", ["prefill", "batch", "memory"])
def test_every_topic_of_a_text_to_text_model(run: Run, folders: dict[str, Path], topic: str) -> None:
    words = ["--context", 8, "--new-tokens", 4, "--batch", 2, "--rounds", 1, "--weights", "none", "--json"]
    result = run("bench", topic, folders["text to text"], *words)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert all(row["ratio"] > 0 for row in rows)
    if topic == "memory":
        assert {row["what"] for row in rows} == {"weights"}  # nothing of an answer stays


@pytest.mark.parametrize("beams", [1, 3])
def test_the_answer_of_a_text_to_text_model(run: Run, tmp_path: Path, beams: int) -> None:
    """All new tokens, as generate() in Python gives them behind the one that a decoder begins with."""
    folder, tokenizer, model = tmp_path, AutoTokenizer.from_pretrained(TINY), T5ForConditionalGeneration(T5).eval()
    model.generation_config.num_beams = beams  # as translators' say
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = "translate this, please"
    expected = model.generate(tokenizer(text, return_tensors="pt")["input_ids"], max_new_tokens=5, do_sample=False)
    words = ["--prompt", text, "--max-new-tokens", 5, "--weights", "none", "--temperature", 0]
    found = json.loads(run("generate", folder, *words, "--json").stdout)
    assert found["tokens"] == expected[0, 1:].tolist()
    assert found["text"].strip() == run("generate", folder, *words).stdout.strip()
    assert "no chat template" in one_line(run("generate", folder, *words, "--chat"))
