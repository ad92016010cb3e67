"""hf-accel in this process, which has torch already, and in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hf_accel.cli.app import app

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "stdlib-tiny"
Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a command sets for its process is taken back; files that it writes by a relative name are not ours."""
    for name, value in {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run() -> Run:
    """Run a command here; result.stdout and result.stderr are apart."""

    def run(*words: object, input: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words], input=input)

    return run


def start(*words: object, **settings: Any) -> subprocess.Popen[str]:
    """hf-accel in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    # A process that a shell started in the background ignores Ctrl-C, and so would those that it starts.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from hf_accel.cli.app import app; "
    )
    return subprocess.Popen(
        [sys.executable, "-c", code + "app()", *map(str, words)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment | settings.pop("environment", {}), **settings,
    )  # fmt: skip


def one_line(result: Result, code: int = 2) -> str:
    """The only line of an error."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("hf-accel: ")
    return line
