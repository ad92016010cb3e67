"""Results as JSON lines: a line for each model and feature, with the versions and the code that they are of."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "families"
# what results depend on
CODE = ("hf_accel", "tests/families", ":!tests/families/re*.py", ":!tests/families/test_*.py")

Line = dict[str, Any]


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__, "code": _code()}


def _code() -> str:
    """A digest of the files, whatever else a commit holds."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-s", *CODE], capture_output=True, text=True).stdout
    changed = subprocess.run(["git", "-C", str(ROOT), "diff", "--", *CODE], capture_output=True, text=True).stdout
    return hashlib.sha1((listed + changed).encode()).hexdigest()[:10]


def read(folder: Path, wanted: dict[str, str] | None = None) -> list[Line]:
    """Of the wanted versions, or all; the latest where a model was asked twice."""
    lines: dict[tuple[str, str], Line] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # the process was killed while it wrote
                continue
            if wanted is None or line["versions"] == wanted:
                lines[line["model"], line["feature"]] = line
    return list(lines.values())


def append(path: Path, lines: Iterable[Line]) -> None:
    """All lines of a model at once: a killed run leaves no half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
