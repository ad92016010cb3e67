"""`hf-accel serve` as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from .running import SHIPPED, WAIT

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_ACCEL_API")}
    return {**kept, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}


def command(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end: for what is refused."""
    line = [sys.executable, "-m", "hf_accel", "serve", *map(str, arguments)]
    return subprocess.run(
        line, env=environment(**more), capture_output=True, text=True, check=False, timeout=4 * WAIT, cwd=ROOT
    )


class Process:
    """A server in a process. said: what it printed when it was ready."""

    def __init__(self, arguments: Sequence[str | Path], launcher: Sequence[str] = ()) -> None:
        line = [sys.executable, *launcher, "-m", "hf_accel", "serve", *map(str, arguments), "--json"]
        self.process = subprocess.Popen(
            line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self.process.stdout is not None
        said = ""
        while not said.endswith("}\n"):
            line_of_it = self.process.stdout.readline()
            if not line_of_it:
                raise AssertionError(self.process.communicate()[1])
            said += line_of_it
        self.said: dict[str, Any] = json.loads(said)
        self.url: str = self.said["url"]
        self.root = self.url.removesuffix("/v1")

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=WAIT)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns the exit code and what was written to stderr."""
        _, written = self.process.communicate(timeout=2 * WAIT)
        return self.process.returncode, written


@contextmanager
def process(*arguments: str | Path, port: int = 0, alone: bool = True) -> Iterator[Process]:
    """Run a server. alone: whether it serves the shipped model; else `arguments` say which."""
    own: tuple[str | Path, ...] = (SHIPPED, "--name", "tiny") if alone else ()
    found = Process([*own, "--weights", "none", "--port", str(port), *arguments])
    try:
        yield found
    finally:
        found.process.kill()
        with contextlib.suppress(ValueError):  # its pipes were read to the end before
            found.process.communicate()
