"""The commands that the pages show run, one after the other, and fail nowhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ..pages import PAGES, ROOT, blocks
from .conftest import Run

SHOWN = ("plan", "estimate", "quantize", "generate", "verify", "bench")  # embed needs a model that is downloaded


def commands(document: str) -> list[str]:
    """The lines of a document's shell blocks, but for those that need what a test does not have."""
    return [line for block in blocks(document, "sh") if not block.needs for line in block.code.splitlines()]


@pytest.mark.parametrize("document", [page for page in PAGES if commands(page)])
def test_commands_run(run: Run, document: str) -> None:
    Path("examples").symlink_to(ROOT / "examples", target_is_directory=True)
    for line in commands(document):
        words = shlex.split(line, comments=True)
        said = None
        if "|" in words:  # echo "..." | hf-accel ...
            assert words[0] == "echo" and words.index("|") == 2
            said, words = f"{words[1]}\n", words[3:]
        assert words[0] == "hf-accel"
        result = run(*words[1:], input=said)
        assert (result.exit_code, result.stderr) == (0, ""), f"{line}\n{result.output}"
        assert result.stdout


def test_every_command_is_shown() -> None:
    shown = {re.search(r"hf-accel (\w+)", line)[1] for line in commands("docs/command-line.md")}  # type: ignore[index]
    assert shown == set(SHOWN)
