"""Processes of the examples: their start, their end, and what of them is left."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ..serving.running import WAIT

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = EXAMPLES.parent
BEGINNINGS = ["import re\n\ndef ", "class Reader:\n    def ", "def main(", "import os\n", "try:\n    "]


def processes_of(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def until(condition: Callable[[], Any], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for a condition; a process that ends before it holds is an error."""
    end = time.monotonic() + 2 * WAIT
    while not condition():
        assert time.monotonic() < end, "it did not come in time"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)


def started(arguments: Sequence[str | Path], environment: dict[str, str], **more: str) -> subprocess.Popen[str]:
    line = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(
        line, env={**environment, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it wrote; it must end well, and in time."""
    try:
        out, err = process.communicate(timeout=4 * WAIT)
    finally:
        process.kill()
    assert process.returncode == 0, (out, err)
    return out, err
