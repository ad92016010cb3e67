"""Datasets of every kind become the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_accel import UnsupportedError
from hf_accel.distill.drafts.token_rows import token_rows, windows

from .families import llama


def spell(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) - 96 for letter in text]}


@pytest.mark.parametrize(
    "dataset",
    [
        [[1, 2, 3], [4, 5]],
        ((1, 2, 3), [4, 5]),
        [{"input_ids": [1, 2, 3]}, {"input_ids": torch.tensor([4, 5]), "labels": [0, 0]}],
        [
            {"input_ids": [0, 1, 2, 3], "attention_mask": [0, 1, 1, 1]},
            {"input_ids": [4, 5, 0], "attention_mask": torch.tensor([1, 1, 0])},
        ],
        [torch.tensor([1, 2, 3]), torch.tensor([4, 5])],
        ["abc", {"text": "de"}],
        iter([[1, 2, 3], [9], [4, 5], [6, 7]]),
    ],
)
def test_rows(dataset: Any) -> None:
    assert token_rows(dataset, llama(), tokenizer=spell, limit=2) == [[1, 2, 3], [4, 5]]


def test_one_text_is_one_row() -> None:
    assert token_rows("abc", llama(), tokenizer=spell) == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (["abc"], "tokenizer="),
        ([[1], []], "no row of two"),
        ([[1, 2], [3, 61]], "row 1 .* 0 to 60"),
        ([[1.5, 2.5]], "row 0"),
        ([{"labels": [1, 2]}], "row 0"),
        ({"input_ids": [[1, 2]]}, "dict"),
        (5, "int"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: Any, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        token_rows(dataset, llama())


def test_windows_keep_every_pair() -> None:
    assert list(windows([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11]], 2)) == [[1, 2], [3, 4], [6, 7], [8, 9], [10, 11]]
