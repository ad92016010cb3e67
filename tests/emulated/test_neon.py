"""The kernels' own tests on emulated ARM CPUs: their references, and bit for bit what this machine's AVX2 computes.

The library is compiled for ARM and runs under qemu. Only its speed cannot be tested so.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hf_accel.kernels.cpu import build

from .kernel_tests import ARM_CPUS, compared_calls, compile_driver, missing

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FEWEST_CALLS = 1500

REASON = missing(COMPILER, EMULATOR)
pytestmark = [pytest.mark.long, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def test_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, library = tmp_path / "driver", tmp_path / build.LIBRARY
    compile_driver([COMPILER], driver)
    monkeypatch.setenv("CXX", COMPILER)
    assert build.build(library, only=tuple(ARM_CPUS)) == list(ARM_CPUS)
    found = subprocess.run([COMPILER, "-print-sysroot"], capture_output=True, text=True, check=True).stdout.strip()
    root = found if found.strip("/") else f"/usr/{COMPILER.removesuffix('-g++')}"
    start = [EMULATOR, "-E", "OMP_WAIT_POLICY=passive", "-L", root]
    commands = {
        level: [*start, "-cpu", cpu, str(driver), str(library), level, "libgomp.so.1"]
        for level, cpu in ARM_CPUS.items()
    }
    calls = compared_calls(commands)
    assert calls.compared >= FEWEST_CALLS and not calls.near
