"""The kernels' own tests on emulated ARM CPUs: their references, and bit for bit what this machine's AVX2 computes.

The library is compiled for ARM and runs under qemu. Only its speed cannot be tested so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu import build, refusal, using_isa

from .emulator import SETTINGS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# For each level, a CPU that would stop at the instructions of a better one.
CPUS = {"neon_i8mm": "max", "neon_dotprod": "neoverse-n1", "neon": "cortex-a53"}
TESTS = ["tests/unit/kernels", "tests/unit/attention/test_cpu.py", "tests/unit/cache/test_write.py"]
SLOW = "a_row_does_not or decode_of_a_batch"  # rows among others: AVX2 has the same bits, and is tested with them
FEWEST_CALLS = 1500


def missing() -> str | None:
    for program in (COMPILER, EMULATOR):
        if shutil.which(program) is None:
            return f"needs {program}"
    if reason := refusal():
        return reason
    try:
        with using_isa("avx2"):
            return None
    except UnsupportedError as error:
        return f"compares with AVX2: {error}"


pytestmark = [pytest.mark.long, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """The command that runs the driver for a level, on a CPU that has it and nothing better."""
    folder = tmp_path_factory.mktemp("arm")
    driver, library = folder / "driver", folder / build.LIBRARY
    subprocess.run([COMPILER, "-std=c++17", "-O1", str(HERE / "driver.cpp"), "-o", str(driver)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", COMPILER)
        assert build.build(library, only=tuple(CPUS)) == list(CPUS)
    found = subprocess.run([COMPILER, "-print-sysroot"], capture_output=True, text=True, check=True).stdout.strip()
    root = found if found.strip("/") else f"/usr/{COMPILER.removesuffix('-g++')}"
    start = [EMULATOR, "-E", "OMP_WAIT_POLICY=passive", "-L", root]
    return lambda level: [*start, "-cpu", CPUS[level], str(driver), str(library), level]


def test_kernels(command: Callable[[str], list[str]]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_ACCEL", "PYTEST"))}
    environment[SETTINGS] = json.dumps({level: command(level) for level in CPUS})
    plugins = ["-p", "tests.arm.emulator", "-p", "no:cacheprovider"]
    run = [sys.executable, "-m", "pytest", *plugins, "-k", f"not ({SLOW})", *TESTS]
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = re.search(r"(\d+) calls have the bits of avx2", done.stdout)
    assert calls is not None and int(calls[1]) >= FEWEST_CALLS, done.stdout
