"""What a user gets wrong, and what the world does: one line, exit code 2, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from .conftest import TINY, Run, one_line, start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the small model that may be spoilt."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def configure(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


SPOILERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config.json": (lambda f: (f / "config.json").unlink(), "there is no config.json in"),
    "a broken config.json": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "another program's config.json": (lambda f: (f / "config.json").write_text("{}"), "names no model_type"),
    "an unknown architecture": (lambda f: configure(f, model_type="llama99"), "'llama99', which this transformers"),
    "an unknown dtype": (lambda f: configure(f, dtype="bfloat17"), "'bfloat17' is not a dtype"),
    "an impossible shape": (lambda f: configure(f, num_attention_heads="four"), "num_attention_heads"),
    "an adapter": (lambda f: (f / "config.json").rename(f / "adapter_config.json"), "holds an adapter"),
}


@pytest.mark.parametrize("spoilt", SPOILERS)
def test_a_folder_that_holds_no_model(run: Run, folder: Path, spoilt: str) -> None:
    spoil, message = SPOILERS[spoilt]
    spoil(folder)
    assert message in one_line(run("plan", folder))


def test_a_damaged_file(run: Run, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "copy or download it again" in one_line(run("generate", folder, "--prompt", "x"))
    assert "copy or download it again" in one_line(run("quantize", folder, "out"))
    assert not Path("out").exists()


def test_a_missing_file(run: Run, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds cannot be loaded" in one_line(run("generate", folder, "--prompt", "x"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "does not exist"),
        ("./model", "does not exist"),
        ("no/such/folder", "does not exist"),
        ("missing.gguf", "does not exist"),
        ("text.txt", "is a file, and no .gguf"),
        ("nobody/nothing", "not read from the hub"),
    ],
)
def test_a_path_that_is_no_model(run: Run, path: str, message: str) -> None:
    Path("text.txt").write_text("text")
    line = one_line(run("estimate", path, "--bandwidth", "1e9"))
    assert message in line and path in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", TINY, "--weights", "int3"], "--weights int3 is not known"),
        (["plan", TINY, "--method", "awq"], "needs --calibration"),
        (["plan", TINY, "--dtype", "float17"], "'float17' is not a dtype"),
        (["plan", TINY, "--attention", "flash_attn"], "--attention flash_attn"),
        (["plan", TINY, "--speculative", "guessing"], "not read from the hub"),
        (["estimate", TINY, "--context", "0"], "--context 0 must"),
        (["estimate", TINY, "--machine", "foo"], "give --bandwidth and --compute, or one of V100"),
        (["estimate", TINY, "--kv-dtype", "int3"], "--kv-dtype int3 is not known; choose one of none, auto, int8"),
        (["plan", TINY, "--max-tokens", "-1"], "--max-tokens -1 must be an integer of at least 1"),
        (["plan", TINY, "--cache-dtype", "int3"], "--cache-dtype int3 is not known; choose one of auto, int8"),
        (["plan", TINY, "--group-size", "3"], "--group-size 3 is not known; choose one of 32, 64, 128"),
        (["estimate", TINY, "--memory", "RTX 9999"], "RTX"),
        (["generate", TINY, "--prompt", "x", "--prompt-file", "y"], "leave one of them out"),
        (["generate", TINY, "--prompt-file", "missing.txt"], "missing.txt cannot be read"),
        (["generate", TINY, "--prompt", "x", "--chat"], "has no chat template"),
        (["generate", TINY, "--prompt", "x", "--system", "y"], "add --chat"),
        (["generate", TINY], "the prompt is empty"),
        (["quantize", TINY, "out", "--weights", "none"], "leaves nothing to quantize"),
        (["quantize", TINY, "out", "--format", "onnx"], "choose one of transformers"),
        (["quantize", TINY, "full"], "is not empty"),
        (["quantize", TINY, "full/file"], "is there already"),
        (["quantize", TINY, "full", "--format", "gguf"], "is a folder"),
        (["quantize", TINY, "out", "--weights", "int4", "--method", "gptq", "--calibration", "no.txt"], "no.txt"),
        (["verify", TINY, "--reference", "/no/such"], "/no/such does not exist; give a model's folder"),
        (["bench", "decode", "/no/such"], "does not exist"),
    ],
    ids=lambda value: " ".join(map(str, value[:1] + value[2:])) if isinstance(value, list) else None,
)
def test_words_that_cannot_be_met(run: Run, words: list[object], message: str) -> None:
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    assert message in one_line(run(*words))
    assert [path.name for path in Path().rglob("*")] == ["full", "file"]


@pytest.mark.parametrize("format", ["transformers", "compressed-tensors"])
@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [(OSError(errno.ENOSPC, "full"), 2, "could not be written"), (KeyboardInterrupt(), 130, "nothing")],
    ids=["disk full", "Ctrl-C"],
)  # fmt: skip
def test_nothing_is_left_of_what_was_not_finished(
    run: Run, monkeypatch: pytest.MonkeyPatch, format: str, failure: BaseException, code: int, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        found = sorted(path.name for path in Path().iterdir())
        assert found[0].endswith("-unfinished") and found[1:] == [f"{found[0]}.lock"]
        raise failure

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", fail)
    assert message in one_line(run("quantize", TINY, "out", "--format", format), code)
    assert not list(Path().iterdir())


def test_no_room_is_found_out_before_the_work(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    monkeypatch.setattr("hf_accel.cli.quantize.load_patched", None)
    assert "make room" in one_line(run("quantize", TINY, "out"))


def test_an_error_of_ours_is_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by\nnothing")

    monkeypatch.setattr("hf_accel.estimate", fail)
    assert one_line(run("estimate", TINY)).endswith("ZeroDivisionError: by nothing; --debug shows where")
    shown = run("estimate", TINY, "--debug")
    assert shown.exit_code == 2 and "Traceback" in shown.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="has no FIFO")
def test_a_process_that_is_stopped() -> None:
    """It waits for its calibration data when Ctrl-C comes."""
    os.mkfifo("texts.txt")
    process = start("quantize", TINY, "out", "--method", "gptq", "--calibration", "texts.txt")
    with open("texts.txt", "w"):  # returns when the process reads
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (130, "", "hf-accel: interrupted; nothing half-written is left\n")
    assert [path.name for path in Path().iterdir()] == ["texts.txt"]
