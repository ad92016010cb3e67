"""Each mutant can still be made. Whether tests find it is what `make mutants` asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from .table import ROOT, Mutant, mutants


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made(mutant: Mutant, tmp_path: Path) -> None:
    """Its old text stands once in its file, and each test file that it names is there."""
    target = tmp_path / mutant.file
    target.parent.mkdir(parents=True)
    target.write_bytes((ROOT / mutant.file).read_bytes())
    mutant.apply(tmp_path)
    assert mutant.new in target.read_text(encoding="utf-8")
    for test in mutant.tests:
        path, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8") if function else (ROOT / path).exists()


def test_names_differ() -> None:
    names = [mutant.name for mutant in mutants()]
    assert len(names) == len(set(names)) >= 40
