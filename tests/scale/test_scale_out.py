"""The benchmark of two workers against one, with its processes; without them it runs in test_benchmarks.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.harness.models import load_model
from benchmarks.harness.settings import ScaleOut
from benchmarks.topics import scale_out
from benchmarks.topics.http_load import save


@pytest.mark.long
def test_systems_write_the_same_answers(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    work = scale_out.Work(tmp_path, ScaleOut(rows=5, new_tokens=4, batch=2))
    save(scale_out.endless(load_model(str(scale_out.SHIPPED))), tmp_path / "model")
    prompts = ["w12 w7 w9", "w1", "w300 w301", "w5 w5 w5", "w44 w2"]
    scale_out.write_prompts(work, prompts)
    assert json.loads((tmp_path / "prompts.json").read_text()) == prompts
    runs = [scale_out.run_accelerate(work, workers, 1) for workers in (1, 2)]
    if importlib.util.find_spec("ray") is not None:
        runs.append(scale_out.run_ray(work, 2, 1))
    scale_out.check(runs, work.asked)
    assert all(0 < done.seconds < done.whole_seconds for done in runs)
