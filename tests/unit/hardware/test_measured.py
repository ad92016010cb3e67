"""Files of measurements: where they are, and that they are kept together with those of others."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from hf_accel.hardware.measured import cache_file, keep, read


def test_the_folder_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file("a.json") == tmp_path / "hf_accel" / "a.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache_file("a.json") == tmp_path / "home" / ".cache" / "hf_accel" / "a.json"


def test_a_user_without_a_home_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert cache_file("a.json") == Path(tempfile.gettempdir()) / "hf_accel" / "a.json"


def test_what_others_kept_stays(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "a.json"
    keep(file, {"this": {"x": {"1": 1.0, "2": 2.0}}}, "numbers")
    keep(file, {"this": {"x": {"2": 3.0}, "y": {"1": 4.0}}, "that": {"x": {"1": 5.0}}}, "numbers")
    assert read(file) == {"this": {"x": {"1": 1.0, "2": 3.0}, "y": {"1": 4.0}}, "that": {"x": {"1": 5.0}}}
