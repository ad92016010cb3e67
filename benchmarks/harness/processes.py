"""Measurements in processes of their own: peaks of memory, and other settings of the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class ProcessError(Exception):
    """A measurement in a process of its own failed; its last words follow."""


def call(module: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Any:
    """The JSON that `python -m benchmarks.<module>` prints last. environment: what is added to this process's."""
    command = [sys.executable, "-m", f"benchmarks.topics.{module}", *map(str, arguments)]
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise ProcessError(f"{' '.join(command[1:])} stopped with {done.returncode}: {done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def call_all(module: str, fields: Sequence[Mapping[str, Any]]) -> list[Any]:
    """`call` with each of `fields` as JSON, in order, as many side by side as there are cores, on one thread each:
    that uses them better than one after the other on all of them."""

    def one(given: Mapping[str, Any]) -> Any:
        print(f"    begun: {dict(given)}", flush=True)
        found = call(module, json.dumps(given), environment={"OMP_NUM_THREADS": "1"})
        print(f"    done: {dict(given)}: {found}", flush=True)
        return found

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        return list(pool.map(one, fields))
