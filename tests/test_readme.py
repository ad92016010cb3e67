"""The README's first screen is true: its text, its versions, its plot, and each of its numbers."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest

from benchmarks import overview

from .pages import ROOT, read

README = read("README.md")
RESULTS = ROOT / "benchmarks" / "results"
AVX512, AVX2, AMX = "amd-epyc-zen-4-avx512_vnni_bf16", "amd-epyc-zen-3-avx2", "intel-xeon-amx"
XEON = "intel-xeon-avx512_vnni"  # without AMX


def recorded(topic: str, column: str, *, title: str = "", folder: str = AVX512, **where: str) -> Any:
    """A number of a recorded table: of the first table whose title has `title`, and the row that `where` describes."""
    tables = json.loads((RESULTS / folder / f"{topic}.json").read_text(encoding="utf-8"))["tables"]
    table = next(table for table in tables if title in table["title"])
    return next(row[column] for row in table["rows"] if all(row[key] == value for key, value in where.items()))


def served(system: str) -> float:
    return recorded("http_load", "useful_tokens_per_second", title="all at once", system=system)


def encoder(column: str, batch: str = "8 of 8 to 128", *, folder: str = AVX512) -> float:
    return recorded("encoders", column, title="BERT base", batch=batch, folder=folder)


def slowest(model: str, *, folder: str) -> float:
    return recorded("never_slower", "lowest_ratio", folder=folder, model=model)


def slowest_of_all(folder: str) -> float:
    tables = json.loads((RESULTS / folder / "never_slower.json").read_text(encoding="utf-8"))["tables"]
    return min(row["lowest_ratio"] for row in tables[0]["rows"])


def amx(topic: str, title: str) -> float:
    return recorded(topic, "ratio", title=title, folder=AMX, setup="hf_accel int8")


# What the README says, word for word, and the recorded numbers that say so.
CLAIMS = {
    "1.9x less memory": [recorded("memory", "ratio", setup="hf_accel int8")],
    "perplexity +0.03 %": [recorded("quality", "change_percent", weights="int8")],
    "3.2x\nthe throughput": [
        served("hf-accel serve --weights int8") / served("transformers serve --continuous-batching")
    ],
    "93.8 % of its teacher's accuracy at 1.8x its speed": [
        100 * recorded("students", "kept_share", student="distilled"),
        recorded("student_speed", "ratio", setup="hf_accel int8"),
    ],
    "greedy text 2.2x as fast, and sampled text\n2.1x": [
        recorded("drafts", "ratio", title=f"temperature {t}, batch 1,", drafter="head") for t in (0, 1)
    ],
    "2.4x as fast as stock with\n`weights=None`, and 7.5x in INT8, which is 2.0x as fast as OpenVINO's": [
        encoder("exact_ratio"),
        encoder("int8_ratio"),
        encoder("int8_over_openvino_int8_ratio"),
    ],
    "it has 0.86x of OpenVINO's speed": [encoder("int8_over_openvino_int8_ratio", "8 x 128")],
    "INT8 has 2.9x stock's speed at batch 1, 2.4x at batch 16, and 1.5x": [
        amx("decode", "batch 1,"),
        amx("decode", "batch 16"),
        amx("prefill", "prefill"),
    ],
    "Texts without padding have 0.64x": [encoder("int8_over_openvino_int8_ratio", "8 x 128", folder=AMX)],
    "which is 70 % and\n  61 % of the memory's bandwidth": [
        100 * recorded("decode_bench-8b", "bandwidth_share", folder="nvidia-h200", setup=f"hf_accel {weights}")
        for weights in ("exact", "int8")
    ],
    "(at worst 1.01x of its speed), and eight texts through an encoder have 0.97x at worst": [
        slowest_of_all(AVX2),
        encoder("exact_ratio", "8 x 128", folder=AVX2),
    ],
    "tiny models have 0.7x of its speed": [slowest("tiny, float32, exact", folder=XEON)],
    "through GPT-2 in bfloat16 are slower (0.9x)": [slowest("bench-gpt2, bfloat16, exact", folder=AVX512)],
    "128 tokens in float32 (0.9x) and prompts of tiny models (0.8x); GPT-2 in bfloat16 was (0.9x": [
        slowest(f"{model}, exact", folder=AMX)
        for model in ("bench-qwen2, float32", "tiny, float32", "bench-gpt2, bfloat16")
    ],
}
NUMBER = re.compile(r"(\d+\.?\d*)(?:x\b| %)")


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_are_recorded(claim: str) -> None:
    assert re.search(re.escape(claim).replace(r"\ ", r"\s+").replace("\\\n", r"\s+"), README)
    said = NUMBER.findall(claim)
    digits = [len(number.partition(".")[2]) for number in said]
    assert said == [f"{value:.{count}f}" for value, count in zip(CLAIMS[claim], digits, strict=True)]


def test_no_number_is_without_a_record() -> None:
    """The plot's are in the text that stands for it; stock is 1.0x by definition."""
    said = set(NUMBER.findall(README)) - {"1.0"}
    assert said <= {number for claim in CLAIMS for number in NUMBER.findall(claim)} | set(
        NUMBER.findall(overview.svg())
    )


def drawn(setup: str) -> bool:
    """Whether the plot has a setup that the text beside it names: stock is 1.0x by definition."""
    return setup != "stock" and any(setup in group for group in overview.SETUPS.values())


def test_the_plot_is_that_of_the_results() -> None:
    assert overview.PLOT.read_text(encoding="utf-8") == overview.svg()
    described = re.search(r"!\[(Decode speed[^]]+)\]\(docs/decode\.svg\)", README)
    assert described is not None
    others = {f"{ratio:.1f}" for panel in overview.panels() for name, ratio in panel.ratios.items() if drawn(name)}
    assert others == set(NUMBER.findall(described[1])) <= set(NUMBER.findall(overview.svg()))


def test_tables_of_results_are_recorded() -> None:
    known = {line for path in RESULTS.glob("*/README.md") for line in path.read_text(encoding="utf-8").splitlines()}
    rows = [line for line in read("docs/results.md").splitlines() if line.startswith("|")]
    assert len(rows) > 50 and [row for row in rows if row not in known] == []


def test_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for page in (README, read("docs/installing.md")):
        for name in ("torch", "transformers"):
            first, last = re.search(rf"{name} (\d+\.\d+) to (\d+\.\d+)", page).groups()  # type: ignore[union-attr]
            major, minor = last.split(".")
            assert f"{name}>={first},<{major}.{int(minor) + 1}" in project["dependencies"]
        assert f"Python {project['requires-python'].removeprefix('>=')} or later" in page
