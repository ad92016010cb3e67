"""What a wheel is tried with, on what is installed here."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from hf_accel.kernels import cpu

SMOKE = Path(__file__).parents[2] / "release" / "smoke.py"


@pytest.mark.skipif(cpu.refusal() is not None, reason=str(cpu.refusal()))
def test_a_small_model_runs_in_native_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SMOKE), run_name="__main__")
    said = capsys.readouterr().out
    assert "cpu kernels" in said and said.rstrip().endswith("INT8 by cpu")
