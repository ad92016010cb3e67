"""A user's dataset as lists of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from ...errors import UnsupportedError
from ...generation.hf.vocabulary import check_ids


def token_rows(dataset: Any, model: Any, *, tokenizer: Any = None, limit: int | None = None) -> list[list[int]]:
    """Rows of at least two tokens, the first `limit` of them.

    dataset: an iterable (a list, a datasets.Dataset) of token ids, of mappings with "input_ids" (without what their
    "attention_mask" leaves out), or, with a tokenizer, of texts or mappings with "text"; or one text.
    Raises UnsupportedError for anything else, for ids that the model does not know, and if nothing is left.
    """
    if isinstance(dataset, str):
        dataset = [dataset]
    if isinstance(dataset, Mapping) or not isinstance(dataset, Iterable):
        raise UnsupportedError(
            f"dataset is a {type(dataset).__name__}; give rows: lists of token ids, dicts with input_ids, or texts"
        )
    rows = (_ids(row, number, tokenizer) for number, row in enumerate(dataset))
    found = list(islice((row for row in rows if len(row) > 1), limit))
    if not found:
        raise UnsupportedError("dataset has no row of two tokens or more; the first of a row is not predicted")
    for number, row in enumerate(found):
        check_ids(model, row, f"dataset row {number}")
    return found


def _ids(row: Any, number: int, tokenizer: Any) -> list[int]:
    mask = None
    if isinstance(row, Mapping):
        mask = row.get("attention_mask")
        row = row["input_ids"] if "input_ids" in row else row.get("text")
    if isinstance(row, str):
        if tokenizer is None:
            raise UnsupportedError(f"dataset row {number} is text; give tokenizer= too, or token ids")
        row = tokenizer(row)["input_ids"]
    ids = row.tolist() if isinstance(row, Tensor) or hasattr(row, "tolist") else row
    if not isinstance(ids, list | tuple) or not all(isinstance(i, int) for i in ids):
        raise UnsupportedError(
            f"dataset row {number} is a {type(row).__name__} without token ids; give lists of token ids, dicts with "
            "input_ids, or texts and tokenizer="
        )
    if mask is None:
        return list(ids)
    keep = mask.tolist() if hasattr(mask, "tolist") else mask
    return [i for i, kept in zip(ids, keep, strict=True) if kept]


def windows(rows: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """Rows cut into parts of at most `length` tokens, of at least two."""
    for row in rows:
        for start in range(0, len(row), length):
            part = row[start : start + length]
            if len(part) > 1:
                yield part


def prompt_of(row: list[int], prompt_tokens: int) -> list[int]:
    """The first prompt_tokens tokens of a row, or half of a row that is shorter than twice as many."""
    return row[: max(1, min(prompt_tokens, len(row) // 2))]
