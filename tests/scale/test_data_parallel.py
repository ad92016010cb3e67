"""examples/data_parallel.py: every prompt is answered once, in order; a process that is gone is said."""

from __future__ import annotations

import importlib
import importlib.util
import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from accelerate import PartialState

from ..serving.running import WAIT
from ..test_examples import run
from .processes import BEGINNINGS, EXAMPLES, ended, started, until


@pytest.mark.long  # three processes, each of which imports all
def test_processes_share_the_prompts(
    tmp_path: Path, environment: dict[str, str], alone: Callable[[str, int], str]
) -> None:
    """Five prompts for two processes: each is answered once, in order."""
    prompts, out = tmp_path / "prompts.json", tmp_path / "answers.json"
    prompts.write_text(json.dumps(BEGINNINGS))
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    said = ended(started([*launch, EXAMPLES / "data_parallel.py", prompts, "--out", out], environment))[0]
    assert json.loads(out.read_text()) == [alone(prompt, 32) for prompt in BEGINNINGS]
    counts = json.loads(said.splitlines()[-1])
    assert (counts["rows"], counts["workers"]) == (5, 2)


def test_one_process_needs_no_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], alone: Callable[[str, int], str]
) -> None:
    PartialState._reset_state()
    run("data_parallel", monkeypatch=monkeypatch)
    PartialState._reset_state()  # what it knows is shared by the whole process
    example: Any = importlib.import_module("data_parallel")
    answers = capsys.readouterr().out.splitlines()[:-1]
    assert answers == [f"{number}: {alone(prompt, 32)!r}" for number, prompt in enumerate(example.PROMPTS)]


@pytest.mark.long
@pytest.mark.parametrize("what", ["killed", "silent"])
def test_a_process_that_does_not_answer_is_said(what: str, tmp_path: Path, environment: dict[str, str]) -> None:
    """The second process is killed at its work, or stopped: the first one ends by itself, and says why."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(BEGINNINGS))
    line = [EXAMPLES / "data_parallel.py", prompts, "--max-new-tokens", "1500", "--timeout", "5"]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    first, second = (started(line, environment, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2))
    try:
        until(lambda: [one for one in psutil.Process(second.pid).net_connections() if one.status == "ESTABLISHED"])
        second.send_signal(signal.SIGKILL if what == "killed" else signal.SIGSTOP)
        out, err = first.communicate(timeout=2 * WAIT)
        assert first.returncode == 1 and out == ""
        said = [line for line in err.splitlines() if line.startswith("data_parallel: ")]
        assert len(said) == 1 and "another process has died, or did not answer within 5 s" in said[0]
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
