"""Triton's kernels, interpreted on the CPU in processes of their own.

Which tests of tests/unit run there is said here. A GPU needs none of this: `make gpu` runs the gpu mark as it is.
Triton's compiler needs no process of its own: tests/unit/kernels/triton compiles for GPUs that are not there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_accel.kernels import triton

ROOT = Path(__file__).parents[1]
PAGED = "tests/unit/attention/test_paged.py"
PARITY = "tests/unit/linear/test_parity.py"
WRITE = "tests/unit/cache/test_write.py"
KERNELS = "tests/unit/kernels/triton"

# A case for each feature. The cases are those of all backends.
ATTENTION = [
    f"{PAGED}::test_equals_oracle[mixed-None-triton]",
    f"{PAGED}::test_equals_oracle[verify, ragged-3-triton by row]",
    f"{PAGED}::test_equals_oracle[more queries than keys-16-triton]",
    f"{PAGED}::test_equals_oracle[zero lengths-None-triton]",
    f"{PAGED}::test_equals_oracle[decode of very different lengths-None-triton]",
    f"{PAGED}::test_softcap_and_sinks[verify, ragged-both-3-triton]",
    f"{PAGED}::test_lse[mixed-sinks-triton]",
    f"{PAGED}::test_dtypes_groups_and_layouts[dims1-3-(8, 1)-torch.bfloat16-triton]",
    f"{PAGED}::test_dtypes_groups_and_layouts[dims2-16-(4, 2)-torch.float16-triton]",
    f"{PAGED}::test_quantized_pages[torch.int8-mixed-None-torch.bfloat16-triton]",
    f"{PAGED}::test_quantized_pages[torch.float8_e4m3fn-verify, ragged-3-torch.bfloat16-triton]",
    f"{PAGED}::test_quantized_pages[torch.uint8-mixed-None-torch.float32-triton]",
    f"{PAGED}::test_parts_over_disjoint_keys_merge[sinks-triton]",
    "tests/unit/attention/test_packed.py::test_equals_oracle[sinks-False-with a past-triton]",
    f"{WRITE}::test_bits_of_the_torch_path[triton-torch.bfloat16-torch.int8]",
    f"{WRITE}::test_bits_of_the_torch_path[triton-torch.float16-torch.float8_e4m3fn]",
    f"{WRITE}::test_numbers_that_are_none[triton-torch.float32-torch.uint8]",
    f"{KERNELS}/test_attention.py",
]
LINEARS = [
    f"{PARITY}::test_zero_points[triton-float-272-256-128-torch.bfloat16]",
    f"{PARITY}::test_zero_points[triton by row-float-33-128-64-torch.float16]",
    f"{PARITY}::test_as_the_float_layer_with_the_dequantized_weight[triton-float-int8-257x48-torch.bfloat16-bias]",
    f"{PARITY}::test_as_the_float_layer_with_the_dequantized_weight[triton-float-int4-112x64-torch.float32-no-bias]",
    f"{PARITY}::test_unpack_returns_what_was_packed[triton-float-int4-64x384-torch.bfloat16]",
    f"{PARITY}::test_as_the_float_layer_with_the_dequantized_weight[triton-int8-int8-33x64-torch.bfloat16-bias]",
    f"{PARITY}::test_zero_points[triton-int8-33-128-64-torch.float16]",
    f"{PARITY}::test_as_the_float_layer_with_the_dequantized_weight[triton-float-fp8-257x48-torch.bfloat16-bias]",
    f"{PARITY}::test_as_the_float_layer_with_the_dequantized_weight[triton-fp8-fp8-64x384-torch.float16-bias]",
    f"{KERNELS}/test_quantized_linear.py",
    f"{KERNELS}/test_fp8_linear.py",
    f"{KERNELS}/test_torch_blocks.py",
    f"{KERNELS}/test_layer_parts.py",
]
MODELS = [
    "tests/unit/fused/test_on_gpu.py",
    f"{KERNELS}/test_end_to_end.py",
    f"{KERNELS}/test_captured_model.py",
]
ALL = [
    PARITY,
    "tests/unit/linear/test_stored_elsewhere.py",
    "tests/unit/fused/test_on_gpu.py",
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


@pytest.mark.parametrize("cases", [ATTENTION, LINEARS, MODELS], ids=["attention", "linears", "models"])
def test_features_in_the_interpreter(cases: list[str]) -> None:
    run_tests("-rN", "-m", "not long", *cases)


@pytest.mark.long
@pytest.mark.parametrize("path", ALL)
def test_all_in_the_interpreter(path: str) -> None:
    run_tests("-m", "gpu" if path != KERNELS else "gpu or not gpu", path)
