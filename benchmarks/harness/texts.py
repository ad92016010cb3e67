"""Prompts from a text, for what people ask of a model: to edit code, to quote, to go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .settings import Settings

SHIPPED = Path(__file__).parents[2] / "examples" / "stdlib-tiny"
Tokens = list[int]


def read_tokens(tokenizer: Any, settings: Settings) -> Tokens:
    """Of the text that was named, or of the shipped model's held-out Python."""
    path = Path(settings.text) if settings.text else SHIPPED / "heldout.txt"
    ids: Tokens = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    return ids


def editing(passage: Tokens) -> Tokens:
    """Code, and then its first lines once more: a base model that was asked for it again goes on copying."""
    size = len(passage)
    return passage[: size * 7 // 8] + passage[: size // 8]


def quoting(passage: Tokens) -> Tokens:
    """Two pieces that were quoted before, in turns, the second time as far as the middle of the first."""
    size = len(passage)
    one, other = passage[: size * 3 // 8], passage[size * 3 // 8 : size * 5 // 8]
    return one + other + one[: size * 3 // 8 - size // 4] + other[: size // 8]


def open_text(passage: Tokens) -> Tokens:
    """To be gone on with."""
    return passage


KINDS: dict[str, Callable[[Tokens], Tokens]] = {"editing": editing, "quoting": quoting, "open text": open_text}


def prompts(tokens: Tokens, kind: str, *, count: int, length: int) -> list[Tokens]:
    """`count` prompts of at most `length` tokens, from passages that lie evenly over the text."""
    length = min(length, len(tokens))
    step = (len(tokens) - length) // max(1, count)
    return [KINDS[kind](tokens[number * step : number * step + length]) for number in range(count)]
