"""Triton's kernels, interpreted on the CPU in processes of their own.

Which tests of tests/unit run there is said here and in features.py. A GPU needs none of this: `make gpu` runs the gpu
mark as it is. Triton's compiler needs no process of its own: tests/unit/kernels/triton compiles for GPUs that are not
there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_accel.kernels import triton

from .features import ATTENTION, KERNELS, LINEARS, PAGED, PARITY

ROOT = Path(__file__).parents[1]
JOINED = "tests/unit/fused/test_joined_layers.py"
MODELS = [
    "tests/unit/fused/test_on_gpu.py",
    f"{JOINED}::test_launches_of_a_layer[triton]",
    f"{JOINED}::test_weights_dtypes_and_pages[triton-bfloat16-int4]",
    f"{KERNELS}/test_end_to_end.py",
    f"{KERNELS}/test_captured_model.py",
]
ALL = [
    PARITY,
    "tests/unit/linear/test_stored_elsewhere.py",
    "tests/unit/fused/test_on_gpu.py",
    JOINED,
    # Dense attention goes through torch on a GPU as well: nothing of it is interpreted.
    PAGED,
    "tests/unit/attention/test_packed.py",
    "tests/unit/attention/test_memory.py::test_only_the_needed_blocks_are_gathered",
    "tests/unit/cache/test_write.py",
    KERNELS,
]

pytestmark = pytest.mark.skipif(not triton.is_installed(), reason="Triton is not installed")


def run_tests(*arguments: str) -> None:
    """Run pytest in a process of its own that interprets; it must pass, and some tests must have run."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--override-ini=addopts=-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout + " 0 passed")[0]) > 0, done.stdout


def test_features_in_the_interpreter() -> None:
    run_tests("-rN", "-m", "not long", *ATTENTION, *LINEARS, *MODELS)


@pytest.mark.long
@pytest.mark.parametrize("path", ALL)
def test_all_in_the_interpreter(path: str) -> None:
    run_tests("-m", "gpu" if path != KERNELS else "gpu or not gpu", path)
