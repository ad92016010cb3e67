from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_accel.hardware import busy


def test_cores_that_others_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Idle time and waiting for a disk are no work; time that the host took is."""
    ticks = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 10 20 5000 300 1 2 3 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    monkeypatch.setattr(busy, "STAT", stat)

    def sleep(seconds: float) -> None:
        counted = [100 + ticks, 10, 20, 9000, 900, 1, 2, 3 + ticks, 8, 0]
        stat.write_text(f"cpu  {' '.join(map(str, counted))}\n")

    clock = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr(busy, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: next(clock)))
    assert busy.busy_cores() == 1.0
    monkeypatch.setattr(busy, "STAT", tmp_path / "nothing")
    assert busy.busy_cores() is None
