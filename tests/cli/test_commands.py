"""Each command on the small model: what it prints, and that --json prints that and nothing else."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_accel
from hf_accel.cli import topics
from hf_accel.cli.measurement import WrongResultError
from hf_accel.cli.token_options import sampling_of
from hf_accel.kernels import cpu as kernels

from .conftest import TINY, Run, start

HELDOUT = TINY / "heldout.txt"
BUFFERS = 2 * 32 * 4  # bytes of the rotation's frequencies
PROMPT = "import re\n\ndef parse("


def answer(result: Any) -> dict[str, Any]:
    """The one JSON document on stdout, after nothing was said on stderr."""
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    document: dict[str, Any] = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(word))
    return document


# -- plan and estimate ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "keywords"),
    [
        ([], {}),
        (["--weights", "none", "--no-fuse"], {"weights": None, "fuse": False}),
        (["--weights", "int4", "--group-size", "32", "--skip", "down_proj", "--head", "none", "--cache-dtype", "int8"],
         {"weights": {"bits": 4, "group_size": 32, "skip": ["down_proj"], "head": None}, "cache": {"dtype": "int8"}}),
        pytest.param(
            ["--speculative", "ngram", "--deterministic"], {"speculative": "ngram", "deterministic": True},
            marks=pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal())),
        ),
    ],
    ids=["default", "exact", "int4", "drafts"],
)  # fmt: skip
def test_plan_is_that_of_the_loaded_model(run: Run, words: list[str], keywords: dict[str, Any]) -> None:
    document = answer(run("plan", TINY, "--json", *words))
    loaded = hf_accel.plan(AutoModelForCausalLM.from_pretrained(TINY), **keywords).to_dict()
    assert document.pop("path") == str(TINY)
    for one in (document, loaded):  # what is measured
        one["choices"] = [line for line in one["choices"] if line["topic"] != "speed"]
        del one["least_seconds_per_token"], one["bandwidth_bytes_per_second"]
    assert document == json.loads(json.dumps(loaded))


def test_plan_as_text(run: Run) -> None:
    result = run("plan", TINY)
    assert result.stdout.startswith("hf_accel plan: LlamaForCausalLM, 3.7 M parameters")
    in_other_dtype = run("plan", TINY, "--dtype", "float32").stdout
    assert "originals stay in memory" in " ".join(in_other_dtype.split())  # which no file holds in float32


def test_plan_loads_no_weight(run: Run, tmp_path: Path) -> None:
    """A model of a billion parameters, of which there is nothing but the config."""
    config = json.loads((TINY / "config.json").read_text())
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | heads))
    result = run("plan", tmp_path, "--weights", "int4")
    assert "1,100.0 M parameters" in result.stdout
    assert "154 linears" in result.stdout


def test_estimate(run: Run) -> None:
    words = ["--context", "1024", "--batch", "2", "--weights", "int4", "--bandwidth", "1e9", "--price-per-hour", "2"]
    document = answer(run("estimate", TINY, "--json", *words, "--memory", "1GB"))
    expected = hf_accel.estimate(TINY, context=1024, batch=2, weights="int4", bandwidth=1e9, price_per_hour=2.0)
    assert document.pop("fits") == {"1GB": True}
    assert document.pop("path") == str(TINY)
    assert document == json.loads(json.dumps(expected.to_dict()))
    assert "KV cache     int8" in run("estimate", TINY, "--bandwidth", "1e9", "--kv-dtype", "int8").stdout


# -- quantize ------------------------------------------------------------------------------------------


def test_quantize_and_what_loads_it(run: Run) -> None:
    document = answer(run("quantize", TINY, "int4", "--weights", "int4", "--json"))
    assert document["out"] == "int4" and document["tokenizer"]
    saved = AutoModelForCausalLM.from_pretrained("int4")
    expected = hf_accel.patch(AutoModelForCausalLM.from_pretrained(TINY), weights="int4")
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(saved(ids).logits, expected(ids).logits)
    assert AutoTokenizer.from_pretrained("int4").vocab_size == 2048
    assert [path.name for path in Path().iterdir()] == ["int4"]  # nothing unfinished beside it
    # what was saved, in the other commands
    assert "hf_accel plan: LlamaForCausalLM" in run("plan", "int4").stdout
    line = run("quantize", "int4", "again", "--weights", "int8").stderr
    assert "quantized already" in line and len(line.splitlines()) == 1
    verified = answer(run("verify", "int4", "--reference", TINY, "--prompt", PROMPT, "--max-new-tokens", 4, "--json"))
    assert verified["reference"] == "the quantized reference" and verified["cost"]["tokens"] > 4
    assert "quantized already" in run("bench", "memory", "int4").stderr


def test_quantize_by_calibration_for_other_engines(run: Run) -> None:
    Path("texts.jsonl").write_text(json.dumps({"text": HELDOUT.read_text()[:4000]}))
    words = ["--weights", "int4", "--method", "gptq", "--calibration", "texts.jsonl", "--format", "compressed-tensors"]
    result = run("quantize", TINY, "w4a16", *words)
    assert result.exit_code == 0, result.output
    assert "28 linears" in result.stdout and "W4A16" in result.stdout
    config = json.loads(Path("w4a16/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "import re" not in run("generate", "w4a16", "--prompt", "import re", "--max-new-tokens", "4").stderr


def test_quantize_to_gguf(run: Run) -> None:
    pytest.importorskip("gguf")
    document = answer(run("quantize", TINY, "tiny.gguf", "--weights", "int4", "--format", "gguf", "--json"))
    assert Path("tiny.gguf").stat().st_size > document["tensor_bytes"]
    assert "hf_accel plan: LlamaForCausalLM" in run("plan", "tiny.gguf").stdout
    assert answer(run("estimate", "tiny.gguf", "--bandwidth", "1e9", "--json"))["parameters"] > 3e6


# -- generate ------------------------------------------------------------------------------------------


def expected_text(num_new: int, **keywords: Any) -> str:
    model = hf_accel.patch(AutoModelForCausalLM.from_pretrained(TINY), **keywords)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=num_new, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_generate_writes_what_generate_writes(run: Run) -> None:
    text = expected_text(12, weights=None)
    words = ["--weights", "none", "--max-new-tokens", 12]
    assert run("generate", TINY, *words, "--prompt", PROMPT).stdout == f"{text}\n"
    assert run("generate", TINY, *words, input=f"{PROMPT}\n").stdout == f"{text}\n"
    Path("prompt.txt").write_text(PROMPT)
    document = answer(
        run("generate", TINY, *words, "--prompt-file", "prompt.txt", "--speculative", "suffix", "--json")
    )
    assert (document["prompt"], document["text"], len(document["tokens"])) == (PROMPT, text, 12)
    assert document["stats"]["tokens_per_second"] > 0


def test_generate_samples_by_seed(run: Run) -> None:
    words = ["--prompt", PROMPT, "--max-new-tokens", 12, "--temperature", 1, "--seed"]
    first, again, other = (run("generate", TINY, *words, seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_generate_chooses_as_the_model_says(run: Run, tmp_path: Path) -> None:
    """By generation_config.json where no option says otherwise, as the server reads a request."""
    model = AutoModelForCausalLM.from_pretrained(TINY)
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=1.5)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "model")
    hf_accel.patch(model)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    inputs = tokenizer(PROMPT, return_tensors="pt")

    def expected(seed: int, **settings: Any) -> list[int]:
        torch.manual_seed(seed)
        return list(model.generate(**inputs, max_new_tokens=8, **settings)[0, inputs["input_ids"].shape[1] :].tolist())

    cases: list[tuple[list[object], dict[str, Any]]] = [
        ([], {}),
        (["--temperature", 0], {"do_sample": False}),
        (["--temperature", 0, "--repetition-penalty", 1], {"do_sample": False, "repetition_penalty": 1.0}),
        (["--top-k", 3, "--min-p", 0.1], {"top_k": 3, "min_p": 0.1}),
    ]
    for options, settings in cases:
        words = ["--prompt", PROMPT, "--max-new-tokens", 8, "--seed", 1, "--json", *options]
        assert answer(run("generate", tmp_path / "model", *words))["tokens"] == expected(1, **settings), options


@pytest.mark.parametrize(
    ("given", "seed", "found"),
    [
        ({}, None, {}),
        ({"repetition_penalty": 1.2}, None, {"repetition_penalty": 1.2}),
        ({"top_k": 4}, None, {"top_k": 4, "temperature": 1.0, "do_sample": True}),
        ({}, 1, {"temperature": 1.0, "do_sample": True}),
        ({"temperature": 0.0, "top_p": 0.5}, 1, {"do_sample": False}),
    ],
)
def test_what_makes_sense_only_for_samples(given: dict[str, Any], seed: int | None, found: dict[str, Any]) -> None:
    """Of a model that is greedy by itself."""
    every = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty")) | given
    assert sampling_of(GenerationConfig(), every, seed=seed) == found


def test_generate_stops_where_it_is_told(run: Run) -> None:
    text = expected_text(12)
    stop = text[4:7]
    assert run("generate", TINY, "--prompt", PROMPT, "--max-new-tokens", 12, "--stop", stop).stdout.count(stop) <= 1


def test_generate_in_a_chat(run: Run, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}def "
    AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    words = ["--prompt", "hello", "--system", "be short", "--max-new-tokens", 6, "--json"]
    chat = answer(run("generate", tmp_path / "chat", "--chat", *words))
    whole = "# system: be short\n# user: hello\ndef "
    plain = answer(run("generate", TINY, "--prompt", whole, "--max-new-tokens", 6, "--json"))
    assert chat["tokens"] == plain["tokens"]


def test_a_process_streams_and_says_nothing_else() -> None:
    process = start("generate", TINY, "--max-new-tokens", 8, "--weights", "none")
    out, error = process.communicate(PROMPT, timeout=120)
    unexpected = [line for line in error.splitlines() if "warning: cpu kernels: " not in line]  # without a compiler
    assert (process.returncode, unexpected) == (0, [])
    assert out == f"{expected_text(8, weights=None)}\n"


# -- verify --------------------------------------------------------------------------------------------


def test_verify(run: Run) -> None:
    result = run("verify", TINY, "--weights", "none", "--prompt", PROMPT, "--max-new-tokens", 8)
    assert result.exit_code == 0
    assert result.stdout.startswith("certificate: 1 of 1 prompts identical to the unpatched model")
    Path("text.txt").write_text(HELDOUT.read_text()[:2000])
    document = answer(run("verify", TINY, "--text", "text.txt", "--max-new-tokens", 4, "--json"))
    assert document["explained"] and len(document["verdicts"]) > 2
    assert document["cost"]["text"] == "the text given" and math.isfinite(document["cost"]["kl"])


def test_verify_says_by_its_exit_code_what_differs(run: Run, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(TINY)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(-1)
    other.save_pretrained(tmp_path / "other")
    words = ["--weights", "none", "--reference", tmp_path / "other", "--prompt", PROMPT, "--max-new-tokens", 8]
    result = run("verify", TINY, *words)
    assert (result.exit_code, result.stderr) == (1, "")
    assert "beyond rounding" in result.stdout


# -- bench ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["decode", "prefill", "batch", "memory", "ladder"])
def test_bench(run: Run, topic: str) -> None:
    words = ["--context", 16, "--new-tokens", 3, "--rounds", 2, "--weights", "int4"]
    document = answer(run("bench", topic, TINY, *words, "--json"))
    assert document["kernels"] == (kernels.refusal() or kernels.isa())
    names = [row["name"] for row in document["rows"]]
    assert names[0] == "stock" and document["rows"][0]["ratio"] == 1
    assert len(names) == {"memory": 4, "ladder": 5}.get(topic, 2)
    for row in document["rows"]:
        if topic == "memory":
            assert row["bytes"] > 0
        else:
            assert row["seconds"] > 0 and row["lowest_ratio"] <= row["ratio"] <= row["highest_ratio"]


def test_bench_as_text(run: Run) -> None:
    out = run("bench", TINY, "--context", 16, "--new-tokens", 2, "--rounds", 1).stdout
    assert f"kernels {kernels.refusal() or kernels.isa()}, 1 threads, 1 rounds" in out
    row = r"^patched +a decode step +[\d,.]+ ms +[\d.]+x  \([\d.]+ to [\d.]+\)  KL [\d.e-]+, same top token \d+%$"
    assert re.search(row, out, re.MULTILINE)


def test_bench_compares_before_it_measures(run: Run) -> None:
    """On random tokens: exact weights have no divergence, INT4 has some, another model is not timed."""
    words = ["--context", 32, "--new-tokens", 2, "--rounds", 1, "--dtype", "float32", "--json"]
    exact = answer(run("bench", TINY, *words, "--weights", "none"))["rows"]
    assert exact[0]["kl"] == 0 and exact[1]["kl"] < 1e-6 and exact[1]["same_top"] == 1
    int4 = answer(run("bench", TINY, *words, "--weights", "int4"))["rows"]
    assert 1e-4 < int4[1]["kl"] < 0.5

    model = AutoModelForCausalLM.from_pretrained(TINY)
    other = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(WrongResultError, match=r"patched: .* diverge .* nothing was timed"):
        topics.compare({"stock": model, "patched": other}, 32, print)


@pytest.mark.parametrize(("cores", "said"), [(1.5, True), (0.1, False), (None, False)])
def test_bench_says_that_the_machine_is_busy(
    run: Run, monkeypatch: pytest.MonkeyPatch, cores: float | None, said: bool
) -> None:
    monkeypatch.setattr("hf_accel.hardware.busy.busy_cores", lambda seconds: cores)
    result = run("bench", "memory", TINY, "--context", 8)
    assert ("other processes took 1.5 cores" in result.stdout) == said


def test_memory_is_that_of_the_weights(run: Run) -> None:
    rows = answer(run("bench", "memory", TINY, "--context", 32, "--json"))["rows"]
    assert rows[0]["bytes"] == sum(p.nbytes for p in AutoModelForCausalLM.from_pretrained(TINY).parameters()) + BUFFERS
    assert rows[2]["bytes"] == 32 * 4 * 2 * 2 * 64 * 2  # tokens, layers, K and V, heads, numbers, bytes
