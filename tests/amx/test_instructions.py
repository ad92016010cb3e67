"""The AMX instructions themselves, on a CPU without them: compiled over AVX2, and executed by an emulator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_accel.hardware import possible_levels
from hf_accel.hardware.device import instruction_sets
from hf_accel.kernels.cpu.build import BuildError, find_compiler

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KERNELS = ROOT / "hf_accel" / "kernels" / "cpu"

# A library of one level, in which the stand-in's place is taken by the instructions.
BUILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import build
build.LEVELS = {"avx2_tiles": [*build.LEVELS["avx2_tiles"], "-DHFA_AMX"]}
build.build(Path(sys.argv[2]))
"""


def compiler() -> list[str] | None:
    try:
        return find_compiler()
    except BuildError:
        return None


@pytest.mark.long
@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="the emulator handles Linux's signals")
@pytest.mark.skipif("avx2_tiles" not in possible_levels(instruction_sets()), reason="needs AVX2")
@pytest.mark.skipif("amx_tile" in instruction_sets(), reason="the CPU has AMX: test_tiles.py runs its instructions")
def test_instructions_do_what_the_stand_in_does(tmp_path: Path) -> None:
    library, emulator = tmp_path / "kernels.so", tmp_path / "emulator.so"
    subprocess.run([sys.executable, "-c", BUILD, str(KERNELS), str(library)], check=True)
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", str(HERE / "emulator.cpp"), "-ldl"]
    subprocess.run([*(compiler() or ()), *flags, "-o", str(emulator)], check=True)
    environment = {**os.environ, "HF_ACCEL_LIBRARY": str(library), "HF_ACCEL_ISA": "avx2_tiles"}
    environment |= {"LD_PRELOAD": str(emulator), "OMP_NUM_THREADS": "1"}
    # faulthandler would take the signal of illegal instructions.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:faulthandler", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/unit/kernels/test_tiles.py", "-k", "avx2_tiles"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    products = re.search(r"AMX emulator: (\d+) products", done.stderr)
    assert products is not None, done.stderr
    assert int(products[1]) > 10_000
