"""Every example runs, and what it prints is what it is there to show."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import re
import runpy
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_accel

EXAMPLES = Path(__file__).parent.parent / "examples"
SHIPPED = EXAMPLES / "stdlib-tiny"
COVERED = {
    "quickstart", "cache_reuse", "save_and_load", "estimate", "quality", "speed", "table", "train_tiny_model", "serve",
    "speculate", "samples", "distil", "draft", "distil_classifier", "plot", "calibrate", "qlora", "laptop_chat",
    "label_csv", "ray_batch", "ray_serve", "data_parallel",
    "tensor_parallel", "context_parallel",  # in tests/parallel, which has ranks
}  # fmt: skip


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python examples/x.py` has it: the examples' folder first on the path."""
    monkeypatch.syspath_prepend(EXAMPLES)


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def few_modules(packages: tuple[str, ...], folder: Path, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let examples find five short modules of each package: to read all of the standard library takes seconds."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for package in packages:
        files = [file for file in (library / package).glob("*.py") if file.stat().st_size > 2_000]
        (folder / package).mkdir(parents=True)
        for file in sorted(files, key=lambda file: file.stat().st_size)[:5]:
            shutil.copy(file, folder / package)
    places = sysconfig.get_paths() | {"stdlib": str(folder)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_: places)


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == COVERED


def test_quickstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("quickstart", "--quick", monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    sections = ["hf_accel plan: ", "stock transformers", "certificate: ", "bit for bit", "4. Quality", "tokens/s"]
    places = [out.find(section) for section in sections]
    assert -1 not in places and places == sorted(places)
    assert "DIFFER" not in out
    assert out.count("def parse(") == 3
    rows = table_rows(out)
    assert [row[0] for row in rows] == [
        "stock", "weights=None", "int8", "int4, group 128", "int8, int8 KV",
        "stock", "weights=None", "int8", "int4, group 128",
    ]  # fmt: skip
    quality = {row[0]: row for row in rows[:5]}
    # 4 layers, 2 heads of 64 numbers for K and V each: 2 bytes a number, or 1 and a 2-byte scale a head
    assert quality["stock"][-1] == quality["int8"][-1] == f"{4 * 2 * 2 * 64 * 2:,} B"
    assert quality["int8, int8 KV"][-1] == f"{4 * 2 * 2 * (64 + 2):,} B"


def test_calibrate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("calibrate", "--quick", monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    nearest, calibrated = (float(part.split("KL from the float model: ")[1].split()[0]) for part in out.split("gptq:"))
    assert calibrated < 0.75 * nearest
    assert "28 linears  W4A16 in groups of 128" in out and "loaded: the same integers" in out


@pytest.mark.long  # it trains, and a process serves what came out
def test_qlora(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Trained, merged, quantized and saved; a process serves it, and answers as generate() of the same files does."""
    pytest.importorskip("peft")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run("qlora", "--quick", "--out", str(tmp_path / "tuned"), monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    trained, merged, again = (
        line for line in out.splitlines() if line.startswith(("loss on", "merged", "quantized ag"))
    )
    before, after = (float(number) for number in re.findall(r"\d\.\d{3}", trained))
    assert after < before - 0.02
    assert abs(float(merged.split()[-1]) - after) < 0.1 and abs(float(again.split()[-1]) - after) < 0.1
    assert "28 linears  W4A16 in groups of 128" in out
    model, tokenizer = hf_accel.load(tmp_path / "tuned"), AutoTokenizer.from_pretrained(tmp_path / "tuned")
    alone = []
    for prompt in ("import re\n\ndef ", "class Reader:\n    def "):
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs.input_ids.shape[1] :]
        alone.append(tokenizer.decode(ids, skip_special_tokens=True))
    assert [ast.literal_eval(line[8:]) for line in out.splitlines() if line.startswith("served: ")] == alone
    assert out.endswith("the server ended with 0\n")


def test_laptop_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = iter(["hello", "and then?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    run("laptop_chat", "--max-new-tokens", "8", monkeypatch=monkeypatch)
    first, second = re.findall(r"\((\d+) tokens, (\d+) of them known;", capsys.readouterr().out)
    assert first[1] == "0"
    assert int(second[1]) == int(first[0]) + 7  # of 8 written tokens the last was never fed


def test_label_csv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run("label_csv", "--demo", monkeypatch=monkeypatch)
    lines = (tmp_path / "rows.labelled.csv").read_text().splitlines()
    assert lines[0] == "text,label" and len(lines) == 7
    assert {line.rpartition(",")[2] for line in lines[1:]} <= {"code", "text"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "rows.labelled.csv"]
    computed = int(re.search(r"(\d+) tokens computed", capsys.readouterr().out)[1])  # type: ignore[index]
    example: Any = importlib.import_module("label_csv")
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    prompts = [example.INSTRUCTION.format(labels="code, text") + example.QUESTION.format(text=t) for t in example.DEMO]
    total = sum(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
    assert computed == total - 5 * 16  # of the instruction, a whole block is shared


@pytest.mark.parametrize("arguments", [["missing.csv"], [], ["rows.csv", "--text", "body"]])
def test_label_csv_says_in_one_line_what_is_missing(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text\na\n")
    with pytest.raises(SystemExit) as exit:
        run("label_csv", *arguments, monkeypatch=monkeypatch)
    assert exit.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def table_rows(out: str) -> list[list[str]]:
    """The cells of all rows that end in bytes per token."""
    lines = [line for line in out.splitlines() if line.endswith(" B")]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


@pytest.mark.parametrize("arguments", [["--model", "/no/such/model"], ["--text", "/no/such/text"], ["--model", "."]])
def test_quickstart_says_in_one_line_what_is_missing(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        run("quickstart", *arguments, monkeypatch=monkeypatch)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and arguments[1] in error


def test_cache_reuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("cache_reuse", monkeypatch=monkeypatch)
    out = capsys.readouterr().out.splitlines()
    assert "1196 tokens: 0 known, 1196 computed" in out[1]
    assert "1197 tokens: 1184 known, 13 computed" in out[2]  # 74 full blocks of 16
    # 8 samples of 1191 + 16 tokens: 74 shared full blocks, and 2 of each row's own
    assert "8 samples: 90 blocks, 608 if" in out[4]


def test_serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("serve", monkeypatch=monkeypatch)
    out = capsys.readouterr().out.splitlines()
    assert {line.split(":")[0] for line in out[:-1]} == {"user 0", "user 1", "user 2"}
    tokens, passes = [int(word) for word in out[-1].split() if word.isdigit()]
    assert 3 <= tokens <= 3 * 48 and passes < tokens  # the three were served together
    assert len((EXAMPLES / "serve.py").read_text(encoding="utf-8").splitlines()) <= 50


def test_speculate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("speculate", monkeypatch=monkeypatch)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["none", "ngram", "suffix", "self-int4"]
    for row in rows[1:]:
        assert float(row[1]) > 1 and int(row[2]) > 0


def test_samples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("samples", monkeypatch=monkeypatch)
    out = capsys.readouterr().out.splitlines()
    assert [line.startswith("best") for line in out].count(True) == 1
    computed, alone = [int(word) for word in out[-1].split() if word.isdigit()]
    assert computed < alone / 3  # the prompt once, and not four times


@pytest.mark.long
def test_distil(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run("distil", "4", monkeypatch=monkeypatch)
    losses = [float(part.split("'")[0]) for part in capsys.readouterr().out.split("held-out loss ")[1:]]
    assert len(losses) == 2 and all(2 < loss < 4.5 for loss in losses)  # untrained, the student is at 4.3
    assert losses[1] < losses[0]
    drawn(tmp_path / "distil.png")
    assert len((EXAMPLES / "distil.py").read_text(encoding="utf-8").splitlines()) <= 40  # 30 without blank lines


def drawn(path: Path) -> None:
    if importlib.util.find_spec("matplotlib"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_draft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    few_modules(("json", "email", "asyncio"), tmp_path / "stdlib", monkeypatch=monkeypatch)
    run("draft", "--steps", "1", "--measured", "48", monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert out.count("acceptance at temperature 1 on the dataset's text") == 2  # before and after
    assert "same tokens as without a draft: True" in out
    assert re.search(r"served: \d+ tokens/s without the draft, \d+ with it, (faster|slower) with it", out)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "draft").config.num_hidden_layers == 1
    drawn(tmp_path / "draft.png")


def test_distil_classifier(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    few_modules(importlib.import_module("distil_classifier").PACKAGES, tmp_path / "stdlib", monkeypatch=monkeypatch)
    run("distil_classifier", "--steps", "1", "--labelled", "64", monkeypatch=monkeypatch)
    rows = [line.rsplit("  ", 1) for line in capsys.readouterr().out.splitlines() if line.endswith(" %")]
    assert [name.strip() for name, _ in rows] == ["teacher, 4 layers", "few labels", "teacher's answers"]
    drawn(tmp_path / "distil_classifier.png")


def test_save_and_load(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("save_and_load", monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert "loaded patched: True" in out
    assert "bit for bit: True" in out
    assert "def parse(" in out


def test_estimate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("estimate", monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("fits")] == ["no", "no", "yes"]
    assert "KV cache     bfloat16, 10.7 GB" in out  # 80 layers * 8 heads * 128 * 2 * 2 bytes * 32768 tokens
    assert "KV cache     int8, 5.45 GB" in out  # a byte for each of them, and 2 for each head's scale


def test_quality_measures_perplexity() -> None:
    quality: Any = importlib.import_module("quality")
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    windows = torch.randint(2048, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        log_probabilities = model(windows).logits.double().log_softmax(-1)
    chosen = log_probabilities[:, :-1].gather(-1, windows[:, 1:, None])
    perplexity, kv_bytes = quality.measure(model, windows, None)
    assert perplexity == pytest.approx(math.exp(-chosen.mean()), rel=1e-3)
    assert kv_bytes == windows.numel() * 2048


@pytest.mark.parametrize(("num_tokens", "shape"), [(2000, (3, 512)), (512, (1, 512)), (100, (1, 100))])
def test_quality_cuts_windows(num_tokens: int, shape: tuple[int, int]) -> None:
    quality: Any = importlib.import_module("quality")

    def tokenizer(text: str, **keywords: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(5000)[None]}

    windows = quality.read_windows(tokenizer, "", num_tokens)
    assert windows.shape == shape
    assert torch.equal(windows.flatten(), torch.arange(windows.numel()))


def test_speed_makes_a_model_that_is_large_enough() -> None:
    speed: Any = importlib.import_module("speed")
    model = speed.large_model(200 * 10**6)
    read = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    assert 200 * 10**6 <= read < 200 * 10**6 + 1.01 * layer
    assert all(torch.isfinite(p).all() and p.abs().max() > 0 for p in model.parameters())


def test_table_aligns_its_columns() -> None:
    table: Any = importlib.import_module("table")
    assert table.table(["", "n"], [["one", "1"], ["two", "1,000"]]).splitlines() == [
        "           n",
        "  ---  -----",
        "  one      1",
        "  two  1,000",
    ]


@pytest.mark.long
def test_train_tiny_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run("train_tiny_model", "--steps", "2", "--batch-size", "2", "--out", str(tmp_path), monkeypatch=monkeypatch)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in SHIPPED.iterdir()}
    assert "held-out perplexity" in capsys.readouterr().out
