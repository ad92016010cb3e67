"""`make docs` makes a site without a warning: links and headings exist, and each public name has its docstring."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import hf_accel

ROOT = Path(__file__).parent.parent


@pytest.mark.long  # links, headings and the reference are in test_pages.py as well
@pytest.mark.skipif(
    not (find_spec("mkdocs") and find_spec("material") and find_spec("mkdocstrings")), reason="mkdocs is not installed"
)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    reference = (tmp_path / "docs/api/index.html").read_text(encoding="utf-8")
    documented = set(re.findall(r'<h3 id="hf_accel\.(\w+)"', reference))
    assert documented == set(hf_accel.__all__)
    assert "<code>keep_original</code>: " in reference  # an argument is the item of a list
    assert (tmp_path / "examples/quickstart.py").is_file() and (tmp_path / "docs/decode.svg").is_file()


def test_the_navigation_leaves_out_no_page() -> None:
    pages = re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    missing = {path.name for path in (ROOT / "docs").glob("*.md")} - {Path(page).name for page in pages}
    assert not missing, "pages that the navigation leaves out"
