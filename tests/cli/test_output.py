"""stdout has the answer and nothing else; stderr shows progress, on a terminal."""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers.utils import logging

from hf_accel.cli import output as module
from hf_accel.cli.output import Bar, Output, json_value
from hf_accel.errors import HfAccelWarning


def test_what_libraries_print_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with Output.opened(json=True, debug=False) as output:
        print("said by a library")
        output.write({"answer": 1}, "words")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"answer": 1}
    assert captured.err == "said by a library\n"


def test_warnings_of_ours_take_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Output.opened(json=False, debug=False) as output:
        warnings.simplefilter("always")
        warnings.warn("two\nlines", HfAccelWarning, stacklevel=1)
        warnings.warn("of others", FutureWarning, stacklevel=1)
        output.write({}, "words")
    captured = capsys.readouterr()
    assert captured.err == "hf-accel: warning: two lines\n"
    assert captured.out == "words\n"


def test_json_has_no_word_for_what_is_no_number() -> None:
    found = json_value({"a": float("nan"), "b": (1, float("inf")), "c": Path("x"), 1: {"d": None, "e": True}})
    assert found == {"a": None, "b": [1, None], "c": "x", "1": {"d": None, "e": True}}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal would be sent."""
    sent = io.StringIO()
    console = Console(file=sent, force_terminal=True, width=100)
    monkeypatch.setattr(module, "Console", lambda **_: console)
    return sent


def test_progress_on_a_terminal(terminal: io.StringIO) -> None:
    """With the bars that transformers and hf_accel draw."""
    output = Output(sys.stdout, json=False)
    with output.progress("loading") as now:
        bar: Any = logging.tqdm(total=7, desc="Quantizing weights", unit=" layers")
        with bar:
            bar.update(3)
            bar.set_postfix(layer="a")
            assert isinstance(bar, Bar)
        assert list(logging.tqdm(range(5), desc="Verifying")) == [0, 1, 2, 3, 4]
        logging.tqdm(total=9, desc="Hidden", disable=True).update()
        now("writing")
    assert not isinstance(logging.tqdm(total=1, disable=True), Bar)
    shown = terminal.getvalue()
    assert "writing" in shown


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    was = logging.is_progress_bar_enabled()
    with Output(sys.stdout, json=False).progress("loading") as now:
        now("writing")
        assert list(logging.tqdm(range(2))) == [0, 1]
    assert logging.is_progress_bar_enabled() == was
    assert capsys.readouterr() == ("", "")
