"""The README is true: its snippets run, what it says they print is what they print, its numbers have a source."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import textwrap
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_accel.distill.drafts import draft
from hf_accel.kernels import cpu as kernels

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/architecture.md",
    "docs/gpu.md",
    "docs/serving.md",
    "docs/speculation.md",
    "docs/command-line.md",
    "docs/parallel.md",
    "docs/scale.md",
]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that looks like a clone and may be written to."""
    (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")  # Trainer's default, without a GPU
def test_snippets_run_in_order_and_print_what_is_shown(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "measure_acceptance", partial(draft.measure_acceptance, max_tokens=256))
    namespace: dict[str, Any] = {}
    blocks = BLOCK.findall(README)
    assert len(blocks) == README.count("```python")
    # a step in bfloat16 takes seconds on a CPU that has no instructions for it, and one shows as much as four
    printed = [(run(code.replace("max_steps=4", "max_steps=1"), namespace), shown) for code, shown in blocks]
    for got, shown in printed:
        if shown:
            assert doctest.OutputChecker().check_output(shown, got, doctest.ELLIPSIS), got
    assert any(shown for _, shown in printed)


def run(code: str, namespace: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), namespace)
    return printed.getvalue()


def test_the_text_shown_is_the_model_s(clone: Path) -> None:
    """Its beginning: further on, the rounding of another machine may decide between two tokens."""
    printed = run(BLOCK.findall(README)[0][0], {})
    assert printed.startswith("import re\n\ndef parse(value):")
    assert textwrap.indent(printed[:70], "    ") in README


def test_numbers_have_a_file() -> None:
    quoted = README.partition("<!-- results -->")[2].partition("<!-- /results -->")[0]
    assert "<!-- /results -->" in README
    rows = [line for line in quoted.splitlines() if line.strip()]
    sources = (ROOT / "benchmarks" / "results").glob("*/README.md")
    known = {line for source in sources for line in source.read_text(encoding="utf-8").splitlines()}
    assert [row for row in rows if row not in known] == []


def test_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in ("torch", "transformers"):
        first, last = re.search(rf"{name} (\d+\.\d+) to (\d+\.\d+)", README).groups()  # type: ignore[union-attr]
        major, minor = last.split(".")
        assert f"{name}>={first},<{major}.{int(minor) + 1}" in project["dependencies"]
    assert f"Python {project['requires-python'].removeprefix('>=')} or later" in README


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in t]
    made_by_benchmarks = {"benchmarks/results/README.md"}
    assert [
        t for t in targets if t not in made_by_benchmarks and not (ROOT / document).parent.joinpath(t).exists()
    ] == []


def test_the_first_page_is_short() -> None:
    assert len(README.splitlines()) <= 210
    assert len((ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()) <= 90
