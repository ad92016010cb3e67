"""`make gpu` on a machine without a GPU: its parts are commands that exist, and one that hangs costs no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_accel
from benchmarks import gpu, plots, run
from benchmarks.gpu import PARTS, Part
from benchmarks.harness import machine
from benchmarks.harness.bench import Bench
from benchmarks.harness.models import MODELS, random_model_on
from benchmarks.harness.results_folder import FOLDER, machine_folder, readme, write
from benchmarks.harness.settings import Settings
from benchmarks.harness.tables import Table
from benchmarks.setups import accel
from benchmarks.topics import ladder
from hf_accel.cli.measurement import finish
from hf_accel.hardware import detect
from hf_accel.kernels import triton
from hf_accel.undo.state import state_of

ROOT = Path(__file__).parent.parent
GPU = {
    "gpu": "NVIDIA H100 80GB HBM3", "compute_capability": [9, 0], "driver": "570.1", "cuda": "12.8",
    "gpu_kernels": "Triton 3.6.0", "memory_bytes": 85e9, "read_bytes_per_second": 2.9e12,
}  # fmt: skip


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"make gpu needs an NVIDIA GPU, and torch {torch.__version__} sees none here"


def test_make_gpu_uses_the_machine_s_python() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "gpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{sys.executable} -m benchmarks.gpu"


def test_all_parts_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for part in PARTS:
        for command in part.commands:
            module, arguments = command[1], list(command[2:])
            if module == "pytest":
                paths = [argument for argument in arguments if argument.startswith("tests/")]
                assert paths and not part.topics and all(Path(path.partition("::")[0]).exists() for path in paths)
                continue
            assert module == "benchmarks.run"
            parsed = run.parse([*arguments, *part.topics])
            assert tuple(parsed.topics) == part.topics and parsed.settings.model in MODELS
            assert parsed.settings.device == "cuda" and parsed.keep_going and parsed.settings.prompt == 8192
            assert parsed.label == parsed.settings.model and 0 < parsed.topic_seconds < part.seconds
    assert "ladder" in {topic for part in PARTS for topic in part.topics}
    assert gpu.SECONDS < 590 and sum(part.seconds for part in PARTS[:-1]) + gpu.AGAIN_SECONDS <= gpu.SECONDS


HANGS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"


def part(name: str, *programs: str, seconds: float = 20.0, topics: tuple[str, ...] = ()) -> Part:
    return Part(name, tuple(("-c", program) for program in programs), seconds, topics)


def test_a_part_that_hangs_or_fails_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed with the processes that it has started, and what it has said is kept."""
    alive = tmp_path / "alive"
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.5)
    ignores = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    child = f"{ignores}\nimport pathlib, time\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"
    parts = [
        part("hangs", f"print('said before'); {HANGS.format(child=child)}", "print('beside it')", seconds=2.0),
        part("fails", "print('x' * 9000 + 'the end'); raise SystemExit(3)"),
        part("runs", "print('fine')"),
    ]
    assert gpu.run(parts, seconds=100, out=tmp_path) == 1
    out = capsys.readouterr().out
    assert [line.split(" s  ")[1] for line in out.splitlines()[-3:]] == [
        "ended after 2 s, its limit", "it failed, exit status 3", "done",
    ]  # fmt: skip
    assert (
        "said before" in (tmp_path / "hangs.log").read_text() and "beside it" in (tmp_path / "hangs-2.log").read_text()
    )
    assert "xxthe end" in out and len(out) < 2 * gpu.MOST_PRINTED + 1500 < 9000 < len(
        (tmp_path / "fails.log").read_text()
    )
    alive.unlink()
    time.sleep(0.3)
    assert not alive.exists()
    assert gpu.run(parts[2:], seconds=100, out=tmp_path) == 0
    assert gpu.run(parts[2:], seconds=1, out=tmp_path) == 1
    assert capsys.readouterr().out.endswith("there was no time left\n")


WRITES = """
import json, pathlib, sys
out, topics = pathlib.Path(sys.argv[sys.argv.index("--out") + 1]), sys.argv[sys.argv.index("--out") + 2:]
for topic in topics:
    if topic == "dies": sys.exit(9)
    rows = [{"setup": "stock", "choice": "auto", "ratio": 1.0, "step_seconds": 0.01, "a": 1.0, "b": 2.0}]
    table = {"title": "t", "rows": rows, "note": ""}
    result = {"topic": topic, "tables": [table], "refused": {"hf_accel int4": "it broke", "torchao": "missing"}}
    (out / f"{topic}_m.json").write_text(json.dumps(result))
"""


def test_what_was_measured_is_told_and_the_topics_after_one_that_died_get_a_second_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "AGAIN_SECONDS", 5.0)
    (tmp_path / "memory_m.json").write_text('{"topic": "memory"}')
    os.utime(tmp_path / "memory_m.json", (1, 1))  # of another day
    made = Part("bench", (("-c", WRITES, "--label", "m"),), 20.0, ("decode", "dies", "prefill", "batching"))
    assert gpu.run([made], seconds=100, out=tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "once more for prefill, batching"
    told = [
        "t [ratio, step seconds, a]",
        "  stock auto 1.00x 10.00 ms 1.0",
        "hf_accel int4 did not take part: it broke",
    ]
    expected = [
        one if one.startswith(" ") else f"{topic}: {one}"
        for topic in ("decode", "prefill", "batching")
        for one in told
    ]
    assert lines[2:11] == expected
    assert lines[-1].endswith("it failed, exit status 9")
    made = replace(made, topics=("decode", "prefill"))
    assert gpu.run([made], seconds=100, out=tmp_path) == 0
    assert not any("once more" in line for line in capsys.readouterr().out.splitlines())


def test_without_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu.run_part(PARTS[0], 1) == "pytest is not installed"


def test_an_unknown_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["decode-9b"])
    assert (
        "part 'decode-9b' is not known; choose some of tests-models, 8b, tests-kernels, 1b" in capsys.readouterr().err
    )


# -- topics ------------------------------------------------------------------------------------------------


def test_the_ladder_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measure is on top of those before it; graphs are off before their step, and on from it."""
    bench = Bench(Settings(model="tiny", context=16))
    seen: list[tuple[str | None, str, bool]] = []

    def with_cache(_: Bench, entrant: Any) -> float:
        fused = state_of(entrant.model) if hf_accel.is_patched(entrant.model) else None
        attention = entrant.model.config._attn_implementation
        seen.append((os.environ.get(ladder.SWITCH), attention, bool(fused and fused.config.fuse)))
        return 1.0

    monkeypatch.delenv(ladder.SWITCH, raising=False)
    monkeypatch.setattr(ladder, "with_cache", with_cache)
    monkeypatch.setattr(ladder, "without_cache", lambda bench, model: seen.append((None, "naive", False)) or 2.0)
    steps = dict(ladder.steps_on_gpu(bench))
    assert [step() for step in steps.values()] == [2.0] + [1.0] * 7
    stock, *more = list(steps)[2:6]
    assert stock == "flash attention (sdpa): stock"
    assert more == ["hf_accel: attention over pages", "fused layers", "CUDA graphs: hf_accel exact"]
    ours = "hf_accel"
    assert seen == [
        (None, "naive", False), (None, "eager", False), (None, "sdpa", False), ("0", ours, False), ("0", ours, True),
        (None, ours, True), (None, ours, True), (None, ours, True),
    ]  # fmt: skip


def test_a_topic_that_fails_or_takes_too_long_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(bench: Bench) -> list[Table]:
        while True:
            try:
                time.sleep(30)
            except Exception:  # as what is measured may do
                continue

    def fails(bench: Bench) -> list[Table]:
        raise RuntimeError("CUDA error: out of memory")

    table = Table("a title", [{"setup": "stock", "ratio": 1.0}])

    def half(bench: Bench) -> Iterator[Table]:
        yield table
        yield from slow(bench)

    topics = {"decode": fails, "ladder": slow, "memory": lambda bench: [table], "kinds": half}
    monkeypatch.setattr(run, "TOPICS", topics)
    names = ["decode", "ladder", "memory", "kinds"]
    options = ["--model", "tiny", "--even-busy", "--even-without-kernels", "--out", str(tmp_path), "--label", "x"]
    assert run.main([*names, *options, "--keep-going", "--topic-seconds", "0.3"]) == 1
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["kinds_x.json", "memory_x.json"]
    notes = [
        json.loads((tmp_path / f"{name}_x.json").read_text())["tables"][0]["note"] for name in ("kinds", "memory")
    ]
    assert notes == ["The rest of the topic is missing: it took more than 0.3 s.", ""]
    told = capsys.readouterr()
    assert "decode failed; ladder failed; kinds failed" in told.out
    assert "out of memory" in told.err and "TooLongError: it took more than 0.3 s" in told.err
    with pytest.raises(RuntimeError, match="out of memory"):
        run.main(["decode", *options])
    assert run.main(["memory", *options, "--topic-seconds", "60"]) == 0


def test_a_setup_that_fails_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, model: Any) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(type(accel.INT8), "prepare", fail)
    settings = Settings(model="tiny", setups=("hf_accel int8",))
    bench = Bench(settings, keep_going=True)
    assert bench.entrants.keys() == {"stock"} and bench.entrants.keys() == {"stock"}
    assert bench.refused == {"hf_accel int8": "RuntimeError: no kernel image"}
    with pytest.raises(RuntimeError, match="no kernel image"):
        Bench(settings).entrants  # noqa: B018


def test_results_of_another_machine_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"measure": name, "factor_ratio": 2.0, "product": 2.0**n, "token_seconds": 1.0} for n, name in enumerate("ab")
    ]
    tables = [{"title": "t", "rows": rows, "note": ""}] * 2
    where = {**machine.machine(), **GPU}
    result = {
        "topic": "ladder", "date": "2026-11-23", "command": "c", "model": "bench-8b", "machine": where,
        "versions": {"torch": "2.11"}, "refused": {}, "tables": tables,
    }  # fmt: skip
    write(tmp_path, result, "bench-8b")
    plots.main(tmp_path)
    assert (tmp_path / "ladder_bench-8b.png").stat().st_size > 5000
    assert "![ladder](ladder_bench-8b.png)" in (tmp_path / "README.md").read_text()


# -- results -----------------------------------------------------------------------------------------------


def test_results_stand_in_the_gpu_s_folder(tmp_path: Path) -> None:
    """With what it was measured on, and one file for each model."""
    where = {**machine.machine(), **GPU}
    assert machine_folder(where) == FOLDER / "nvidia-h100-80gb-hbm3"
    result = {
        "topic": "decode", "date": "2026-11-23", "command": "c", "model": "bench-8b", "machine": where,
        "versions": {"torch": "2.11"}, "refused": {}, "tables": [],
    }  # fmt: skip
    folder = tmp_path / "nvidia-h100-80gb-hbm3"
    assert write(folder, result, "bench-8b").name == "decode_bench-8b.json"
    assert json.loads((folder / "decode_bench-8b.json").read_text()) == result
    assert write(folder, result).name == "decode.json"
    text = (folder / "README.md").read_text()
    assert (
        "NVIDIA H100 80GB HBM3, compute capability 9.0, 85 GB, reads 2900 GB/s; driver 570.1, CUDA 12.8, "
        f"Triton 3.6.0; host: {where['cpu']}, "
    ) in text
    assert "[nvidia-h100-80gb-hbm3](nvidia-h100-80gb-hbm3/README.md): NVIDIA H100 80GB HBM3, topics: 2" in readme(
        tmp_path
    )


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "refusal", lambda device: "torch sees no NVIDIA GPU here")
    hardware = detect()
    found = machine.gpu(hardware)
    assert (found["gpu"], found["gpu_kernels"]) == (hardware.name, "torch sees no NVIDIA GPU here")
    said: Any = lambda *args, **more: subprocess.CompletedProcess(args, 0, "570.133.20\n570.133.20\n", "")  # noqa: E731
    monkeypatch.setattr(subprocess, "run", said)
    assert machine.driver() == "570.133.20"

    def missing(*args: Any, **more: Any) -> Any:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert machine.driver() is None


def test_models_are_made_on_the_device() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(**MODELS["tiny"], eos_token_id=None)
    first, again = (random_model_on("cpu", config, seed=3) for _ in range(2))
    assert first.dtype is torch.bfloat16 and not first.training
    assert all(a.equal(b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert first(torch.tensor([[1, 2]])).logits.isfinite().all()


def test_settings_of_a_gpu() -> None:
    settings = Settings(model="tiny").on_gpu()
    assert settings.device == "cuda" and settings.serving.requests == 64 and settings.quicker().device == "cuda"
    assert Bench(settings).description == "tiny"
    assert Bench(Settings(model="/of/this machine/tiny")).description == "tiny"  # no path of it is written to results
    finish("cpu")  # nothing to wait for
