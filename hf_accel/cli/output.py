"""The output of a command: answers on stdout, progress on stderr, and an error as one line with the way out."""

from __future__ import annotations

import ast
import errno
import json
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes; 130 is what a shell gives a program that Ctrl-C has ended
LONGEST = 600  # characters of a message
OTHER_MEANING = ("dtype", "format")  # options whose names are keywords of configs too, with another meaning
NOISY = ("torchao", "torch.utils._pytree")  # loggers that report, while they are imported, what is no concern here


# -- answers and progress -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """answers: stdout as it was; while a command runs, whatever libraries print goes to stderr."""

    answers: TextIO
    json: bool

    @classmethod
    @contextmanager
    def opened(cls, *, json: bool, debug: bool) -> Iterator[Output]:
        """Make the output of a command. debug: whether libraries may write to stderr."""
        if not debug:
            hush()
        answers = sys.stdout
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.showwarning = _show if not debug else warnings.showwarning
            yield cls(answers, json)
        answers.flush()

    def write(self, document: Mapping[str, Any], text: object) -> None:
        """Print the answer: the document as JSON if that was asked for, else the text."""
        self.print(json.dumps(json_value(document), indent=2) if self.json else str(text))

    def print(self, text: str, *, end: str = "\n") -> None:
        print(text, end=end, file=self.answers, flush=True)

    @contextmanager
    def progress(self, task: str) -> Iterator[Callable[[str], None]]:
        """Show progress on a terminal, with the bars of all libraries that draw them through transformers.

        Gives a function that names the current step. Nothing is shown if stderr is no terminal.
        """
        from transformers.utils import logging as transformers_logging

        console = Console(stderr=True)
        if not console.is_terminal:
            with _without_bars(transformers_logging):
                yield lambda name: None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
            main = bars.add_task(task, total=None)
            before = transformers_logging.set_tqdm_hook(lambda factory, args, kwargs: Bar(bars, *args, **kwargs))
            try:
                yield lambda name: bars.update(main, description=name)
            finally:
                transformers_logging.set_tqdm_hook(before)


@contextmanager
def _without_bars(transformers_logging: Any) -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def hush() -> None:
    """Silence messages of libraries that a user of the command line cannot act on. Called before they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


def _show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Show the warnings of hf_accel, one line each, and no others."""
    if category.__name__ == "HfAccelWarning":
        say(f"warning: {' '.join(str(message).split())}")


class Bar:
    """The parts of a tqdm bar that transformers and hf_accel use, drawn by rich."""

    def __init__(self, bars: Progress, iterable: Any = None, *, desc: str | None = None, **settings: Any) -> None:
        self._bars, self._iterable = bars, iterable
        total = settings.get("total")
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)
        disabled = bool(settings.get("disable"))
        self._task = None if disabled else bars.add_task((desc or "").rstrip(": "), total=total)

    def __iter__(self) -> Iterator[Any]:
        try:
            for item in self._iterable:
                yield item
                self.update()
        finally:
            self.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: float = 1) -> None:
        if self._task is not None:
            self._bars.advance(self._task, n)

    def set_description(self, desc: str | None = None, **_: Any) -> None:
        if self._task is not None:
            self._bars.update(self._task, description=desc or "")

    def close(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Accept the other methods of a tqdm bar, which only change how it looks there, and do nothing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def json_value(value: Any) -> Any:
    """Make a value JSON-able: paths become text, and numbers that JSON cannot write become null."""
    if isinstance(value, Mapping):
        return {str(key): json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


# -- errors ---------------------------------------------------------------------------------------------


class BadInputError(Exception):
    """Something that the user gave cannot be used; the message names the way out."""


@contextmanager
def one_line_errors(options: Collection[str], *, debug: bool) -> Iterator[None]:
    """Turn an error of the block into one line and an exit code.

    options: names of the command's options. debug: whether the traceback comes before the line.
    """
    try:
        yield
    except (typer.Exit, SystemExit):
        raise
    except BrokenPipeError:  # the reader of our output has closed it
        sys.stdout = None  # or Python would complain when it flushes it at the end
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        say("interrupted; nothing half-written is left")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        say(line_of(error, options))
        raise typer.Exit(BAD_INPUT) from None


def say(line: str) -> None:
    print(f"hf-accel: {line}", file=sys.stderr)


def line_of(error: BaseException, options: Collection[str]) -> str:
    """Say in one line what is wrong and what to do."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full: {text}; make room, or name a place on another disk"
    if kind == "SafetensorError":
        return f"a safetensors file of the model is damaged: {text}; copy or download it again"
    if kind == "OutOfMemoryError" or (isinstance(error, MemoryError) and not text):
        return f"out of memory {text}; take fewer bits (--weights int4), or a smaller context or batch"
    if isinstance(error, BadInputError) or type(error).__module__.startswith("hf_accel."):
        return as_options(text, options)
    if not isinstance(error, (OSError, ValueError)):
        text = f"{kind}: {text}; --debug shows where"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def as_options(text: str, options: Collection[str]) -> str:
    """Rewrite a message of the library with options of the command line: weights='int4' is --weights int4."""
    text = re.sub(r"\b(weights|cache|speculative)=(\{[^{}]*\})", _as_fields, text)
    names = "|".join(name for name in options if name not in OTHER_MEANING)
    text = re.sub(rf"\b({names})=(?!\{{|\[|\()('[^']*'|None|True|False|-?[\d.]*\d)?", _as_option, text)
    return re.sub(r"\bone of (?:None|'[^']*')(?:(?:, | or |, or | and )(?:None|'[^']*'))*", _as_words, text)


def _as_fields(found: re.Match[str]) -> str:
    """Write the dict of a keyword as keywords of their own, which have options: weights={'bits': 4} is bits=4."""
    try:
        fields: dict[str, Any] = ast.literal_eval(found[2])
    except ValueError:  # a value that Python does not write as a literal
        return found[0]
    names = {"dtype": f"{found[1]}_dtype"}
    return " ".join(
        f"{names.get(name, name)}={one!r}"
        for name, value in fields.items()
        for one in (value if isinstance(value, list | tuple) else [value])
    )


def _as_words(found: re.Match[str]) -> str:
    """Write a list of values without Python's quotes."""
    return found[0].replace("'", "").replace("None", "none")


def _as_option(found: re.Match[str]) -> str:
    name, value = found[1].replace("_", "-"), (found[2] or "").strip("'")
    if value in ("True", "False") and name != "keep-original":
        return f"--{'' if value == 'True' else 'no-'}{name}"
    value = {"None": "none", "True": "yes", "False": "no"}.get(value, value)
    return f"--{name} {value}".rstrip()


def usage_line(error: Any) -> str:
    """Return the line about an option or argument that typer refuses."""
    context = getattr(error, "ctx", None)
    help = f"; {context.command_path} --help shows examples" if context is not None else ""
    return f"{' '.join(error.format_message().split()).rstrip('.')}{help}"
