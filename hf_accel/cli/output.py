"""The output of a command: answers go to stdout, progress to stderr."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .failures import say


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


NOISY = ("torchao", "torch.utils._pytree")  # loggers that report, while they are imported, what is no concern here


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
