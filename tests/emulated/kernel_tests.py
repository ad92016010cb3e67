"""Runs the kernels' own tests with a library for another CPU or system, bit for bit against this machine's kernels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu import refusal, using_isa

from .emulator import SETTINGS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DRIVER = HERE / "driver.cpp"
# For each level, a CPU of qemu's that would stop at the instructions of a better one.
ARM_CPUS = {"neon_i8mm": "max", "neon_dotprod": "neoverse-n1", "neon": "cortex-a53"}
TESTS = ["tests/unit/kernels", "tests/unit/attention/test_cpu.py", "tests/unit/cache/test_write.py"]
SLOW = "a_row_does_not or decode_of_a_batch"  # rows among others, which this machine computes with the same bits


def missing(*programs: str, level: str = "avx2") -> str | None:
    """Why nothing can be compared here: a program is not installed, or this machine does not have the level."""
    absent = next((program for program in programs if shutil.which(program) is None), None)
    if absent is not None:
        return f"needs {absent}"
    if reason := refusal():
        return reason
    try:
        with using_isa(level):
            return None
    except UnsupportedError as error:
        return f"compares with {level}: {error}"


def compile_driver(compiler: Sequence[str], driver: Path) -> None:
    subprocess.run([*compiler, "-std=c++17", "-O1", str(DRIVER), "-o", str(driver)], check=True)


class Calls(NamedTuple):
    """How many calls of kernels were compared, and how many tensors of theirs were near, and not equal to the bit."""

    compared: int
    near: int


def compared_calls(commands: Mapping[str, Sequence[str]], *, has_own_exp: bool = False) -> Calls:
    """Run the tests; each of `commands` runs the driver for its level, the best first. Raises AssertionError.

    has_own_exp: whether the driver runs with another C library than this machine's, whose exp and log have other last
    bits: results may then be near, and must be equal otherwise.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_ACCEL", "PYTEST"))}
    environment[SETTINGS] = json.dumps({"commands": commands, "has_own_exp": has_own_exp})
    plugins = ["-p", "tests.emulated.emulator", "-p", "no:cacheprovider"]
    run = [sys.executable, "-m", "pytest", *plugins, "-k", f"not ({SLOW})", *TESTS]
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    calls = re.search(r"(\d+) calls have the bits of this machine's, but for (\d+) tensors", done.stdout)
    assert done.returncode == 0 and calls is not None, done.stdout + done.stderr
    return Calls(int(calls[1]), int(calls[2]))
