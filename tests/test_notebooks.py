"""Every notebook of examples/ runs from top to bottom in a fresh kernel, and shows what it is there to show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def executed(name: str) -> str:
    """What its cells print and show, as text."""
    notebook: Any = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.get("text") or output["data"].get("text/markdown") or output["data"]["text/plain"]
             for output in outputs if output.get("name") != "stderr"]  # fmt: skip
    return "\n".join(shown)


def test_no_notebook_is_left_out() -> None:
    assert NOTEBOOKS == ["distil", "first_steps", "your_model"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_not_kept(name: str) -> None:
    """They would be of one machine, and large; and each cell is short enough to be read."""
    notebook: Any = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert all(len(cell.source.splitlines()) <= 30 for cell in code)


def test_first_steps() -> None:
    shown = executed("first_steps")
    assert "hf_accel plan: LlamaForCausalLM" in shown and "the same tokens: " in shown
    assert shown.count("certificate: ") == 2 and "against float: perplexity" in shown


@pytest.mark.long  # test_first_steps has a kernel, and the quickstart example the same rows
def test_your_model() -> None:
    rows = [line.split("|")[1:-1] for line in executed("your_model").splitlines() if line.endswith(" MB |")]
    assert [row[0].strip() for row in rows] == ["transformers", "weights=None", "int8", "int4"]
    perplexities = [float(row[1]) for row in rows]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=2e-3) and perplexities[3] > perplexities[0]
    sizes = [float(row[4].split()[0]) for row in rows]
    assert sizes[0] == sizes[1] > sizes[2] > sizes[3]


@pytest.mark.long  # it trains two models
def test_distil() -> None:
    shown = executed("distil")
    losses = [float(number) for number in re.findall(r"(?:untrained|text alone|distilled) (\d+\.\d+)", shown)]
    assert len(losses) == 3
    untrained, alone, distilled = losses
    assert distilled < alone < untrained
    assert "def parse(" in shown
