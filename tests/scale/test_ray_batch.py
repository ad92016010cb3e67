"""examples/ray_batch.py: every row is answered once, with the text of generate(), whoever dies."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ..serving.running import WAIT
from ..test_examples import run
from .processes import BEGINNINGS, EXAMPLES, ended, started, until

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")


def write_prompts(path: Path, prompts: Sequence[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": range(len(prompts)), "prompt": prompts}), path)


def read_answers(out: Path) -> list[dict[str, Any]]:
    """The folder as any reader of parquet takes it."""
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(out).sort_by("id").to_pylist()
    return rows


@pytest.mark.long
@needs_ray
def test_every_row_is_answered_once_though_a_worker_is_killed(
    tmp_path: Path, environment: dict[str, str], alone: Callable[[str, int], str]
) -> None:
    """Two workers, one of them killed after its first batch; what stood there before is not computed again."""
    example: Any = importlib.import_module("ray_batch")
    prompts = [f"# {number}\n{BEGINNINGS[number % len(BEGINNINGS)]}" for number in range(40)]
    file, out, new_tokens = tmp_path / "prompts.parquet", tmp_path / "answers", 160
    write_prompts(file, prompts)
    out.mkdir()
    known = {"id": [3, 4], "text": ["known", "too"], "tokens": [1, 1], "worker": ["before", "before"]}
    example.write(out, known, "id")
    line = [EXAMPLES / "ray_batch.py", file, out, "--batch-size", "4", "--max-new-tokens", str(new_tokens)]
    process = started(line, environment)
    until(lambda: len(list(out.glob("part-*.parquet"))) > 1, process)
    victim = next(row["worker"] for row in read_answers(out) if row["worker"] != "before")
    os.kill(int(victim.rpartition(":")[2]), signal.SIGKILL)
    assert len(read_answers(out)) < len(prompts) / 2
    said = json.loads(ended(process)[0].splitlines()[-1])
    assert said["rows"] == len(prompts) - 2
    rows = read_answers(out)
    assert [row["id"] for row in rows] == list(range(len(prompts)))
    assert [row["text"] for row in rows[3:5]] == ["known", "too"]
    assert all(row["text"] == alone(prompts[row["id"]], new_tokens) for row in rows if row["id"] not in (3, 4))
    assert len({row["worker"] for row in rows}) > 2  # what the killed one wrote last may have been written once more
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    again = json.loads(ended(started(line, environment))[0].splitlines()[-1])
    assert again["rows"] == 0


@pytest.mark.long
@needs_ray
def test_workers_that_die_too_often_end_the_run(tmp_path: Path, environment: dict[str, str]) -> None:
    """It does not hang, says what is left, and keeps what is written."""
    file, out = tmp_path / "prompts.parquet", tmp_path / "answers"
    write_prompts(file, BEGINNINGS * 20)
    line = [EXAMPLES / "ray_batch.py", file, out, "--batch-size", "2", "--max-new-tokens", "200", "--restarts", "0"]
    process = started(line, environment)
    until(lambda: list(out.glob("part-*.parquet")), process)
    os.kill(int(read_answers(out)[0]["worker"].rpartition(":")[2]), signal.SIGKILL)
    error = process.communicate(timeout=4 * WAIT)[1]
    left = len(BEGINNINGS) * 20 - len(read_answers(out))
    said = "ray_batch: RuntimeError: the workers died too often: 2 of them were started"
    assert process.returncode == 1
    assert error.strip().splitlines()[-1].startswith(f"{said}; {left} of 100 rows are left: run it again")


def test_workers_are_not_started_for_ever(tmp_path: Path) -> None:
    example: Any = importlib.import_module("ray_batch")
    for _ in range(3):
        example.count_start(tmp_path, 3)
    with pytest.raises(RuntimeError, match="the workers died too often: 3 of them were started"):
        example.count_start(tmp_path, 3)


@pytest.mark.parametrize(
    ("rows", "arguments", "words"),
    [
        (None, [], "no file"),
        ({"id": [0], "prompt": ["a"]}, ["--prompt", "text"], "has no column 'text'"),
        ({"id": [7, 7], "prompt": ["a", "b"]}, [], "the id 7 stands there more than once"),
        ({"id": [0, 1], "prompt": ["a", ""]}, [], "the row 1 has no prompt"),
        ({"id": [0], "prompt": ["a"]}, ["--max-new-tokens", "9"], "holds answers of other settings"),
    ],
    ids=["no-file", "no-column", "twice", "empty", "settings"],
)
@needs_ray
def test_ray_batch_says_in_one_line_what_is_wrong(
    rows: dict[str, Any] | None,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pyarrow
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "_settings.json").write_text("{}")
    if rows is not None:
        parquet.write_table(pyarrow.table(rows), tmp_path / "rows.parquet")
    with pytest.raises(SystemExit) as exit:
        run("ray_batch", *(["rows.parquet"] if rows else []), *arguments, monkeypatch=monkeypatch)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and words in error


@pytest.mark.parametrize("name", ["ray_batch", "ray_serve"])
def test_without_ray_a_line_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else find_spec(name))
    with pytest.raises(SystemExit) as exit:
        run(name, "--demo", monkeypatch=monkeypatch)
    assert exit.value.code == 2
    extra = "ray" if name == "ray_batch" else "ray,serve"
    assert capsys.readouterr().err == f"{name}: ray is not installed: pip install 'hf_accel[{extra}]'\n"
