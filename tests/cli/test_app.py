"""The command as a whole: help, completion, what was not understood, and how long it takes to say so."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import hf_accel

from .conftest import ROOT, Run, one_line, start

COMMANDS = ("plan", "estimate", "quantize", "generate", "verify", "bench", "serve")


def test_help_needs_no_torch() -> None:
    """Importing it takes seconds, which --help and a shell's completion must not."""
    code = "import sys, hf_accel.cli.app; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_of_the_whole_names_all_commands(run: Run) -> None:
    for words in ([], ["--help"], ["-h"]):
        result = run(*words)
        assert result.exit_code == 0
        assert all(re.search(rf"^\W+{name} ", result.stdout, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS[:-1])
def test_help_teaches_by_example(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert len(re.findall(rf"^ *(?:.*\| )?hf-accel {command} \S", result.stdout, re.MULTILINE)) >= 3
    assert "--json" in result.stdout and "--debug" in result.stdout


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["plan"], "Missing argument 'PATH'"),
        (["plann", "x"], "'plan'"),
        (["plan", "x", "--wieghts", "int8"], "--weights"),
        (["estimate", "x", "--batch", "many"], "'--batch'"),
        (["generate", "x", "--temperature", "-1"], "'--temperature'"),
        (["bench"], "Missing argument"),
        (["bench", "deco", "x"], "choose one of decode, prefill"),
        (["bench", "decode"], "needs a model"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_what_is_not_understood_takes_one_line(run: Run, words: list[str], meant: str) -> None:
    assert meant in one_line(run(*words))


def test_short_help_of_a_command(run: Run) -> None:
    assert run("plan", "-h").stdout == run("plan", "--help").stdout


def test_version(run: Run) -> None:
    assert run("--version").stdout.strip() == hf_accel.__version__


@pytest.mark.parametrize(
    ("line", "found"),
    [("hf-accel ver", ["verify"]), ("hf-accel plan --weights int", ["int8", "int4"]), ("hf-accel plan --deter",
     ["--deterministic"])],
    ids=["command", "value", "option"],
)  # fmt: skip
def test_shell_completion(line: str, found: list[str]) -> None:
    """As bash asks for it."""
    words = {"_HF_ACCEL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    process = start(environment=words)
    out, error = process.communicate()
    assert process.returncode == 0, error
    assert out.split() == found


def test_a_server_that_is_not_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_accel.cli.serve.find_spec", lambda name: None)
    assert 'pip install "hf_accel[serve]"' in one_line(run("serve", "x"))
