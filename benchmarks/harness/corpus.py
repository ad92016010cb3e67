"""Text to train on that every machine has: the source of Python's standard library, less what is measured on."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .texts import SHIPPED

KNOWN_BY = 300  # characters that a module begins with, which are looked for in the text that is measured on
LONG_LINE = 30  # characters, from which on two modules have a line in common by copying alone
MOST_COPIED = 0.1  # of the long lines of a module


def training_windows(tokenizer: Any, held_out: str, *, count: int, length: int, seed: int) -> Tensor:
    """int64 [count, length]: windows that begin anywhere. held_out: left out are modules that begin in it, and those
    of which more than MOST_COPIED of the long lines are in it, like lzma.py beside bz2.py."""
    known = frozenset(long_lines(held_out))
    modules = [text for text in standard_library() if not is_known(text, held_out, known)]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(modules), generator=generator).tolist()
    stream = tokens_of(tokenizer, modules, order, least=4 * count * length)
    starts = torch.randint(len(stream) - length + 1, (count,), generator=generator)
    return torch.stack([stream[start : start + length] for start in starts.tolist()])


def is_known(module: str, held_out: str, known: frozenset[str]) -> bool:
    """Return whether a held-out text holds a module, or much of it. known: the text's long lines."""
    lines = long_lines(module)
    copied = sum(line in known for line in lines)
    return module[:KNOWN_BY] in held_out or copied > MOST_COPIED * len(lines)


def long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if len(line.strip()) > LONG_LINE]


@cache
def standard_library() -> list[str]:
    """The modules that the shipped model was trained on."""
    script = Path(__file__).parents[2] / "examples" / "train_tiny_model.py"
    modules: list[str] = runpy.run_path(str(script))["read_modules"]()[0]
    return modules


def tokens_of(tokenizer: Any, modules: list[str], order: list[int], *, least: int) -> Tensor:
    """Of modules in that order, until there are at least so many."""
    ids: list[int] = []
    for number in order:
        ids += [tokenizer.bos_token_id, *tokenizer(modules[number], add_special_tokens=False, verbose=False).input_ids]
        if len(ids) >= least:
            break
    return torch.tensor(ids)


def held_out_text(path: str | None) -> str:
    return Path(path or SHIPPED / "heldout.txt").read_text(encoding="utf-8")
