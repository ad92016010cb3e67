"""Checks of keywords and of the values that users give them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from .errors import UnsupportedError

Target = TypeVar("Target", bound=Callable[..., Any])


MEANT_BY_PATCH = {  # words of other libraries, and keywords of a config inside this one
    "load_in_4bit": "weights='int4' or weights='nf4'",
    "load_in_8bit": "weights='int8'",
    "bits": "weights='int8' or weights='int4'",
    "quantization": "weights='int8' or weights='int4'",
    "quantization_config": "weights='int8' or weights='int4'",
    "group_size": "weights={'bits': 4, 'group_size': 64}",
    "symmetric": "weights={'bits': 4, 'symmetric': False}",
    "activations": "weights={'activations': 'int8'}",
    "head": "weights={'head': None}",
    "skip": "weights={'skip': ['lm_head']}, with the names to leave alone",
    "modules_to_not_convert": "weights={'skip': ['lm_head']}, with the names to leave alone",
    "fit": "fit= of hf_accel.load(path), which chooses while it loads",
    "dtype": "cache={'dtype': 'int8'} for keys and values, from_pretrained(dtype=) for the model",
    "torch_dtype": "from_pretrained(dtype=) for the model",
    "kv_dtype": "cache={'dtype': 'int8'}",
    "cache_dtype": "cache={'dtype': 'int8'}",
    "kv_cache_dtype": "cache={'dtype': 'int8'}",
    "cache_implementation": "cache='paged', or cache=None for stock's",
    "block_size": "cache={'block_size': 16}",
    "max_tokens": "cache={'max_tokens': 4096}",
    "prefix_sharing": "cache={'prefix_sharing': False}",
    "attn_implementation": "attention=",
    "attn": "attention=",
    "backend": "attention=",
    "drafter": "speculative=",
    "draft_model": "speculative=",
    "assistant_model": "speculative=",
    "num_draft": "speculative={'num_draft': 4}",
}


class Default(str):
    """A keyword's default. It differs from the same word given on purpose: only the latter must be met."""


def one_of(name: str, value: object, allowed: tuple[object, ...], *, instead: str | None = None) -> None:
    """Raise UnsupportedError unless `value` is (by equality and type) among `allowed`.

    instead: what to write for this value, where it is known from elsewhere.
    """
    if not any(value == a and type(value) is type(a) for a in allowed):
        choices = ", ".join(repr(a) for a in allowed)
        way_out = f"choose one of {choices}" if len(allowed) > 1 else f"use {choices}"
        raise UnsupportedError(f"{name}={value!r} is not known; {way_out if instead is None else f'use {instead}'}")


def named(name: str, wanted: str) -> bool:
    """Return whether `wanted` is a module's name or the end of it."""
    return name == wanted or name.endswith("." + wanted)


def positive_int(name: str, value: object, *, way_out: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedError(f"{name}={value!r} must be an integer of at least 1{way_out}")


def positive_number(name: str, value: object) -> None:
    """Raise UnsupportedError unless `value` is None or a finite number above 0."""
    if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
        raise UnsupportedError(f"{name}={value!r} must be a finite number above 0")


def check_keywords(
    where: str,
    given: Iterable[str],
    known: Iterable[str],
    meant: Mapping[str, str] | None = None,
    *,
    known_as: str | None = None,
) -> None:
    """Raise UnsupportedError for the first of `given` that is not among `known`; it names the nearest one that is.

    where: whose keywords they are. meant: for words of other libraries, what to write instead. known_as: what the
    known ones are, where they are too many to be listed.
    """
    names = sorted(known)
    for name in given:
        if name in names:
            continue
        close = difflib.get_close_matches(name, names, n=1) or [n for n in names if n.startswith(name)]
        hint = f"did you mean {close[0]!r}?" if close else known_as or f"known are {', '.join(names)}"
        if meant and name in meant:
            hint = f"use {meant[name]}"
        raise UnsupportedError(f"{where} got an unknown keyword {name!r}; {hint}")


def checked_keywords(**meant: str) -> Callable[[Target], Target]:
    """Decorate a class or a function with keywords of its own: an unknown one raises as `check_keywords` says.

    What `check_positions` finds is raised too.
    """

    def decorate(target: Target) -> Target:
        call = called(target)
        parameters = inspect.signature(call).parameters.values()
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters), "it takes any keyword"
        known = frozenset(p.name for p in parameters if p.kind is not p.VAR_POSITIONAL) - {"self", "cls"}
        check = check_positions(call)

        @functools.wraps(call)
        def checked(*args: Any, **keywords: Any) -> Any:
            if not known.issuperset(keywords):
                check_keywords(_place(call), keywords, known, meant)
            check(args, keywords)
            return call(*args, **keywords)

        return with_call(target, checked)

    return decorate


def check_positions(call: Callable[..., Any]) -> Callable[[tuple[Any, ...], Mapping[str, Any]], None]:
    """Make a function that checks the arguments of `call`: UnsupportedError for positional values that need a name,
    and for missing ones.
    """
    parameters = list(inspect.signature(call).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    others = [f"{p.name}=" for p in parameters if p.kind is p.KEYWORD_ONLY]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in named if p.default is p.empty]
    takes_any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)

    def check(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        if len(args) > len(positional) and not takes_any_number:
            alone = " and ".join(name for name in positional if name != "self") or "nothing"
            raise UnsupportedError(
                f"{_place(call)} takes {alone} without a name, and the others with theirs: {', '.join(others)}"
            )
        missing = [f"{name}=" for name in needed if name not in (*positional[: len(args)], *keywords)]
        if missing:
            raise UnsupportedError(f"{_place(call)} needs {' and '.join(missing)}; add what is missing to the call")

    return check


def _place(call: Callable[..., Any]) -> str:
    """Return the name of a class, or that of a function with parentheses."""
    name = call.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
    return name if call.__name__ == "__init__" else f"{name}()"


def called(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs when a class or a function is called."""
    call: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    return call


def with_call(target: Target, call: Callable[..., Any]) -> Target:
    """Make a class or a function whose call runs `call` instead of `called(target)`."""
    if isinstance(target, type):
        setattr(target, "__init__", call)  # noqa: B010 - mypy refuses the plain assignment
        return target
    return call  # type: ignore[return-value]


def known_keywords(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of `given` that `function` takes: releases of a package differ in a few."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in names}
