"""`optimum-cli hf-accel` of the real optimum: the commands of `hf-accel`, with all their options."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import ROOT, TINY, Run

optimum_cli = pytest.importorskip("optimum.commands.optimum_cli", reason="needs optimum")
REGISTER = "optimum.commands.register"
Call = Callable[..., int]


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip installs next to optimum's, which is there already where this tree is installed."""
    folder = tmp_path / "site"
    (folder / "optimum" / "commands").mkdir(parents=True)
    spec = find_spec(REGISTER)
    registered = [Path(place, "register_hf_accel.py") for place in (spec and spec.submodule_search_locations) or ()]
    if not any(file.is_file() for file in registered):
        (folder / "optimum" / "commands" / "register").symlink_to(ROOT / "hf_accel" / "cli" / "optimum")
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def call(namespace: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """optimum-cli in this process; its exit code."""

    def call(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", *map(str, words)])
        try:
            optimum_cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return call


def test_it_is_listed_and_costs_nothing_until_it_runs(namespace: Path) -> None:
    """optimum imports the file each time that optimum-cli starts."""
    script = (
        "import sys; from optimum.commands.optimum_cli import main\n"
        "sys.path.insert(0, sys.argv.pop())\n"
        "try: main()\n"
        "except SystemExit: print({'hf_accel', 'torch', 'typer'} & set(sys.modules))"
    )
    words = [sys.executable, "-c", script, "--help", str(namespace)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "hf-accel  " in done.stdout and done.stdout.endswith("set()\n"), done.stdout + done.stderr


def test_version(call: Call, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """An option before the first command."""
    assert call("hf-accel", "--version") == 0
    assert capsys.readouterr().out == run("--version").stdout != ""


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_names_the_commands(call: Call, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert call("hf-accel", *words) == 0
    printed = capsys.readouterr().out
    assert "Usage: optimum-cli hf-accel [OPTIONS] COMMAND" in printed
    assert all(f"│ {name} " in printed for name in ("plan", "quantize", "serve", "verify")), printed


@pytest.mark.parametrize("command", ["plan", "quantize", "serve"])
def test_help_of_a_command_is_that_of_hf_accel(
    call: Call, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert call("hf-accel", command, "--help") == 0
    ours = run(command, "--help").stdout
    printed = capsys.readouterr().out
    assert printed.splitlines()[2:] == ours.splitlines()[2:] and "--weights" in ours
    assert f"Usage: optimum-cli hf-accel {command} [" in printed


def test_plan(call: Call, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("hf-accel", "plan", TINY, "--weights", "int4", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    expected = json.loads(run("plan", TINY, "--weights", "int4", "--json").stdout)
    chosen, wanted = ([one for one in each["choices"] if "int4" in str(one)] for each in (printed, expected))
    assert chosen and chosen == wanted and printed.keys() == expected.keys()


def test_quantize_with_options_before_its_arguments(call: Call, tmp_path: Path) -> None:
    """argparse does not look for options of its own among them."""
    assert call("hf-accel", "quantize", "--weights", "int4", "--group-size", "32", TINY, tmp_path / "out") == 0
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {one["group_size"] for name, one in settings["modules"].items() if "up_proj" in name} == {32}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("quantize", "--wieghts", "int4"), "optimum-cli hf-accel quantize --help shows examples"),
        (("plan", "no/such/model"), "hf-accel: "),
        (("serve", TINY, "--port", "x"), "optimum-cli hf-accel serve --help shows examples"),
    ],
)
def test_errors_are_one_line(
    call: Call, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], line: str
) -> None:
    assert call("hf-accel", *words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and line in printed.err, printed.err
