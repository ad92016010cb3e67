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


def training_windows(tokenizer: Any, held_out: str, *, count: int, length: int, seed: int) -> Tensor:
    """int64 [count, length]: windows that begin anywhere. held_out: a module that begins in it is left out."""
    modules = [text for text in standard_library() if text[:KNOWN_BY] not in held_out]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(modules), generator=generator).tolist()
    stream = tokens_of(tokenizer, modules, order, least=4 * count * length)
    starts = torch.randint(len(stream) - length + 1, (count,), generator=generator)
    return torch.stack([stream[start : start + length] for start in starts.tolist()])


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
