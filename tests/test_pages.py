"""The pages are true: their snippets run and print what is shown, their names exist, their links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hf_accel
from hf_accel.distill.drafts import draft
from hf_accel.kernels import cpu as kernels

from .pages import BLOCK, NEEDS, PAGES, ROOT, blocks, read

PACKAGE = ROOT / "hf_accel"
LINKED = [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that looks like a clone and may be written to."""
    (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_block_is_overlooked() -> None:
    found = {page: [len(list(blocks(page, language))) for language in ("python", "sh")] for page in PAGES}
    assert found == {page: [read(page).count("```python"), read(page).count("```sh")] for page in PAGES}
    assert {match["needs"] for page in PAGES for match in BLOCK.finditer(read(page))} <= {None, *NEEDS}
    assert all(
        read(page).count("<!-- needs") == sum(bool(m["needs"]) for m in BLOCK.finditer(read(page))) for page in PAGES
    )


@pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")  # Trainer's default, without a GPU
@pytest.mark.parametrize("page", [page for page in PAGES if any(not b.needs for b in blocks(page, "python"))])
def test_snippets_run_in_order_and_print_what_is_shown(
    page: str, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "measure_acceptance", partial(draft.measure_acceptance, max_tokens=24))
    namespace: dict[str, Any] = {"__name__": page}
    for block in blocks(page, "python"):
        if block.needs:
            continue
        # a step in bfloat16 takes seconds on a CPU that has no instructions for it, and one shows as much as four
        code = block.code.replace("max_steps=4", "max_steps=1")
        code = code.replace("distill_draft(teacher, rows, ", "distill_draft(teacher, rows, batch_size=2, ")
        printed = run(code, namespace)
        if block.shown:
            assert doctest.OutputChecker().check_output(block.shown, printed, doctest.ELLIPSIS), printed


def run(code: str, namespace: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, namespace["__name__"], "exec"), namespace)
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES)
def test_names_of_hf_accel_exist(page: str) -> None:
    """Also in snippets that cannot run here, and in the text: every `hf_accel.name`, and every keyword of a call."""
    for block in blocks(page, "python"):
        assert unknown(block.code) == []
    named = re.findall(r"`hf_accel\.([A-Za-z_]+)", read(page))
    assert [name for name in named if not is_known(name)] == []


def unknown(code: str) -> list[str]:
    """The names of hf_accel, and the keywords of calls of them, that there are none of."""
    wrong = []
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hf_accel":
            wrong += [] if is_known(node.attr) else [node.attr]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_ours(node.func):
            keywords = inspect.signature(getattr(hf_accel, node.func.attr)).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in keywords.values()):
                wrong += [word.arg for word in node.keywords if word.arg and word.arg not in keywords]
    return wrong


def is_ours(function: ast.Attribute) -> bool:
    return isinstance(function.value, ast.Name) and function.value.id == "hf_accel" and is_known(function.attr)


def is_known(name: str) -> bool:
    """Public names, and the package's rooms (`hf_accel.kernels.cpu.build`)."""
    return name in hf_accel.__all__ or (ROOT / "hf_accel" / name).is_dir() or (ROOT / f"hf_accel/{name}.py").is_file()


def test_unknown_names_are_found() -> None:
    assert unknown("hf_accel.pach(model)") == ["pach"]
    assert unknown("hf_accel.patch(model, weight='int8')") == ["weight"]
    assert unknown("hf_accel.patch(model, weights='int8')") == []


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page: str) -> None:
    """Files exist; of a page, so does the heading that a link names."""
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", read(page)) if "://" not in link]
    broken = []
    for link in links:
        file, _, heading = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        if not target.exists() or (heading and heading not in headings(target)):
            broken.append(link)
    assert broken == []


def headings(page: Path) -> set[str]:
    """As GitHub and mkdocs name them in a link."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_reference_names_all_that_is_public() -> None:
    named = re.findall(r"^::: hf_accel\.(\w+)$", read("docs/api.md"), re.MULTILINE)
    assert sorted(named) == sorted(hf_accel.__all__)


def test_all_examples_are_listed() -> None:
    listed = set(re.findall(r"\.\./examples/(\w+\.(?:py|ipynb))", read("docs/examples.md")))
    there = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in {".py", ".ipynb"}}
    assert there - listed == {"table.py", "plot.py"}  # which the others import


def test_the_first_pages_are_short() -> None:
    assert len(read("README.md").splitlines()) <= 120
    assert len(read("docs/architecture.md").splitlines()) <= 90
    for page in ("docs/architecture.md", "docs/inside.md"):
        assert max(map(len, read(page).splitlines())) <= 140, page


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/inside.md"])
def test_named_files_exist(page: str) -> None:
    """Pages about the code name its files: by a path in the package, or by a name that stands somewhere in it."""
    there = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*")}
    named = re.findall(r"`([\w/]+(?:\.(?:py|cpp|h)|/))`", read(page))
    missing = [name for name in named if not any(f"/{one}/".endswith(f"/{name.strip('/')}/") for one in there)]
    assert len(named) > 15 and not [name for name in missing if not (ROOT / name).exists()]
