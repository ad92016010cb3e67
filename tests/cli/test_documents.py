"""The commands that README.md and docs/command-line.md show run, one after the other, and fail nowhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from .conftest import ROOT, Run

BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN = ("plan", "estimate", "quantize", "generate", "verify", "bench")


def commands(document: str) -> list[str]:
    """The lines of a document's shell blocks, but for those that need a network."""
    blocks = BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))
    return [line for block in blocks for line in block.splitlines() if not line.startswith("pip install ")]


@pytest.mark.parametrize("document", ["README.md", "docs/command-line.md"])
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
