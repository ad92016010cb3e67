"""Errors as one line on stderr: what is wrong, and the way out."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from .patch_options import PATCH_OPTIONS

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes; 130 is what a shell gives a program that Ctrl-C has ended
LONGEST = 600  # characters of a message
# Options that are keywords of other functions than patch(); dtype= is in messages about caches too, which say so.
OTHER_OPTIONS = (
    "context", "batch", "bandwidth", "compute", "memory", "machine", "price_per_hour", "requests_per_second",
    "prompt_tokens", "output_tokens", "seconds_per_token", "kv_dtype", "max_new_tokens", "reference",
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
)  # fmt: skip


class BadInputError(Exception):
    """Something that the user gave cannot be used; the message names the way out."""


@contextmanager
def one_line_errors(*, debug: bool) -> Iterator[None]:
    """Turn an error of the block into one line and an exit code. debug: whether the traceback comes before it."""
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
        say(line_of(error))
        raise typer.Exit(BAD_INPUT) from None


def say(line: str) -> None:
    print(f"hf-accel: {line}", file=sys.stderr)


def line_of(error: BaseException) -> str:
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
        return as_options(text)
    if not isinstance(error, (OSError, ValueError)):
        text = f"{kind}: {text}; --debug shows where"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def as_options(text: str) -> str:
    """Rewrite a message of the library with the options of the command line: weights='int4' is --weights int4."""
    names = "|".join((*dict.fromkeys(option.name for option in PATCH_OPTIONS), *OTHER_OPTIONS))
    text = re.sub(rf"\b({names})=(?!\{{|\[|\()('[^']*'|None|True|False|-?[\d.]*\d)?", _as_option, text)
    return re.sub(r"\bone of (?:None|'[^']*')(?:(?:, | or |, or | and )(?:None|'[^']*'))*", _as_words, text)


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
