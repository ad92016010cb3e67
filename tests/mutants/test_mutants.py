"""Each mutant can still be made. Whether tests find it is what `make mutants` asks."""

from __future__ import annotations

from pathlib import Path

from .table import ROOT, mutants


def test_mutants_can_be_made(tmp_path: Path) -> None:
    """The old text of each stands once in its file, and each test that it names is there."""
    for mutant in mutants():
        target = tmp_path / mutant.file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / mutant.file).read_bytes())
        mutant.apply(tmp_path)
        assert mutant.new in target.read_text(encoding="utf-8"), mutant.name
        for test in mutant.tests:
            path, _, function = test.partition("::")
            assert (ROOT / path).exists(), mutant.name
            assert not function or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), mutant.name


def test_names_differ() -> None:
    names = [mutant.name for mutant in mutants()]
    assert len(names) == len(set(names)) >= 40
