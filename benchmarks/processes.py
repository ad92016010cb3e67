"""Measurements in processes of their own: peaks of memory, and other settings of the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


class ProcessError(Exception):
    """A measurement in a process of its own failed; its last words follow."""


def call(module: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Any:
    """The JSON that `python -m benchmarks.<module>` prints last. environment: what is added to this process's."""
    command = [sys.executable, "-m", f"{__package__}.{module}", *map(str, arguments)]
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise ProcessError(f"{' '.join(command[1:])} stopped with {done.returncode}: {done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])
