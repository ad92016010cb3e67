"""Which masks say where tokens are, and how rows are taken out of a padded batch and put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.fused import encoder_rows
from hf_accel.fused.encoder_rows import layout_of, windowed_layout

REAL = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0]]).bool()
LOWEST = torch.finfo(torch.float32).min


def masks(columns: Tensor) -> dict[str, Tensor]:
    """The same columns in each form that models give to their layers."""
    rows = columns[:, None, None]
    numbers = torch.zeros(rows.shape).masked_fill(~rows, LOWEST)
    return {
        "expanded": rows.expand(-1, 1, 4, 4), "repeated": rows.repeat(1, 1, 4, 1), "one query": rows,
        "numbers": numbers.repeat(1, 1, 4, 1), "infinite": numbers.masked_fill(~rows, float("-inf")),
        "bfloat16": numbers.bfloat16().masked_fill(~rows, torch.finfo(torch.bfloat16).min),
    }  # fmt: skip


@pytest.mark.parametrize("form", list(masks(REAL)))
def test_rows_are_taken_and_put_back(form: str) -> None:
    layout, x = layout_of(masks(REAL)[form], 3, 4), torch.randn(3, 4, 5)
    assert layout is not None
    rows = layout.rows(x)
    assert torch.equal(rows, x[REAL])
    assert torch.equal(layout.padded(rows), x * REAL[..., None])
    assert layout.ragged.cu_q.tolist() == [0, 4, 6, 7] and layout.ragged.kv_len.tolist() == [4, 2, 1]


def test_without_padding_nothing_is_copied() -> None:
    x = torch.randn(3, 4, 5)
    for mask in (None, torch.ones(3, 1, 4, 4, dtype=torch.bool), torch.zeros(1, 1, 1, 4)):
        layout = layout_of(mask, 3, 4)
        assert layout is not None and layout.rows(x).data_ptr() == x.data_ptr()
        assert torch.equal(layout.padded(layout.rows(x)), x)


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_that_lie_in_columns_are_copied(batch: int) -> None:
    """Convolutions of patches leave their channels so."""
    x = torch.randn(batch, 5, 4).transpose(1, 2)
    layout = layout_of(None, batch, 4)
    assert layout is not None
    rows = layout.rows(x)
    assert rows.is_contiguous() and torch.equal(rows.view(x.shape), x)


@pytest.mark.parametrize(
    "mask",
    [
        REAL, torch.ones(3, 2, 4, 4, dtype=torch.bool), torch.ones(2, 1, 4, 4, dtype=torch.bool),
        torch.ones(3, 1, 4, 5, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool).tril().expand(3, 1, 4, 4),
        torch.rand(3, 1, 4, 4), torch.ones(3, 1, 4, 4, dtype=torch.long), torch.full((3, 1, 1, 4), -10000.0),
        REAL.flip(1)[:, None, None], torch.zeros(3, 1, 1, 4, dtype=torch.bool),
    ],
)  # fmt: skip
def test_other_masks_are_left_to_the_model(mask: Tensor) -> None:
    """Other forms, what each query sees for itself, biases, rows that do not begin with a token, rows without any."""
    assert layout_of(mask, 3, 4) is None


def test_calls_end_between_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = REAL[:, None, None]
    for most, ends in ((1, [4, 6, 7]), (3, [4, 7]), (6, [6, 7]), (7, [7])):
        monkeypatch.setattr(encoder_rows, "CALL_TOKENS", most)
        layout = layout_of(mask, 3, 4)
        assert layout is not None and [part.rows.stop for part in layout.calls] == ends
        assert all(part.starts.tolist()[-1] == part.rows.stop - part.rows.start for part in layout.calls)


# -- windows ---------------------------------------------------------------------------------------------

PLACES = torch.arange(6)
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]).bool()


def windowed(columns: Tensor, distance: int) -> Tensor:
    """[B, 1, T, T]: keys of `columns` at this distance at most."""
    return (columns[:, None] & ((PLACES[:, None] - PLACES).abs() <= distance))[:, None]


@pytest.mark.parametrize("form", ["bool", "numbers"])
def test_a_window_and_padding(form: str) -> None:
    mask = windowed(RIGHT, 2)
    mask[2, 0, 4, :4] = True  # a query of padding may see anything
    if form == "numbers":
        mask = torch.zeros(mask.shape).masked_fill(~mask, LOWEST)
    layout = windowed_layout(mask, 3, 6, 3)
    assert layout is not None and layout.ragged.kv_len.tolist() == [6, 5, 2]
    assert windowed_layout(windowed(RIGHT[:1], 2), 3, 6, 3) is not None


def test_a_window_over_all_is_a_mask_as_others() -> None:
    holes = torch.tensor([[1, 0, 1, 1, 0, 1]]).bool()
    layout = windowed_layout(windowed(holes, 6), 1, 6, 6)
    assert layout is not None and layout.ragged.kv_len.tolist() == [4]
    assert windowed_layout(None, 1, 6, 6) is not None and windowed_layout(None, 1, 6, 5) is None


SHIFTED = windowed(RIGHT, 2)
SHIFTED[0, 0, 0, 5] = True
BIASED = torch.zeros(3, 1, 6, 6).masked_fill(~windowed(RIGHT, 2), LOWEST)
BIASED[0, 0, 1, 1] = 0.5


@pytest.mark.parametrize(
    "mask",
    [
        windowed(RIGHT, 1), windowed(RIGHT, 3), windowed(RIGHT, 9), windowed(RIGHT, 2).tril(), SHIFTED, BIASED,
        windowed(RIGHT.flip(1), 2), windowed(torch.tensor([[1, 1, 0, 1, 1, 1]] * 3).bool(), 2),
        windowed(RIGHT, 2).expand(3, 2, 6, 6), windowed(RIGHT, 2)[:2], windowed(RIGHT, 2)[:, :, :1],
        windowed(RIGHT, 2).long(), windowed(torch.zeros(3, 6, dtype=torch.bool), 2),
    ],
)  # fmt: skip
def test_masks_that_are_no_window(mask: Tensor) -> None:
    """Narrower, wider, causal, one key more, biases, padding that is not on the right, and other forms."""
    assert windowed_layout(mask, 3, 6, 3) is None


@pytest.mark.parametrize("rows", [1, 3])
def test_cos_and_sin_are_those_of_the_tokens(rows: int) -> None:
    layout = layout_of(REAL[:, None, None], 3, 4)
    assert layout is not None
    cos, sin = torch.randn(2, rows, 4, 8)
    found = layout.tables((cos, sin))
    assert found is not None
    for table, part in zip((cos, sin), found, strict=True):
        assert torch.equal(part, table.expand(3, 4, 8)[REAL])
    for other in ((cos, sin[:, :3]), (cos[:, :3], sin[:, :3]), (cos, sin.double()), (cos[0], sin[0])):
        assert layout.tables(other) is None
    assert layout.tables((cos[:1].repeat(2, 1, 1), sin[:1].repeat(2, 1, 1))) is None


# -- padding that is computed too, and biases -----------------------------------------------------------


@pytest.mark.parametrize(("most", "ends"), [(1, [6, 12, 18]), (13, [12, 18]), (100, [18])])
def test_padding_is_computed_from_the_keys_of_tokens(most: int, ends: list[int], monkeypatch: Any) -> None:
    monkeypatch.setattr(encoder_rows, "CALL_TOKENS", most)
    layout, x = layout_of(RIGHT[:, None, None], 3, 6), torch.randn(3, 6, 5)
    assert layout is not None and layout.ends_with_padding()
    whole = layout.with_padding()
    assert whole is not None and torch.equal(whole.padded(whole.rows(x)), x)
    assert torch.equal(whole.keys_of(whole.rows(x)), x[RIGHT])
    assert whole.ragged.cu_q.tolist() == [0, 6, 12, 18] and whole.ragged.cu_k.tolist() == [0, 6, 11, 13]
    assert [call.rows.stop for call in whole.calls] == ends
    lengths: list[int] = []
    for call in whole.calls:
        assert call.lengths is not None
        assert call.starts.tolist() == list(range(0, call.rows.stop - call.rows.start + 1, 6))
        lengths += call.lengths.tolist()
    assert lengths == [6, 5, 2]


def test_holes_are_no_padding_that_is_computed_too() -> None:
    layout = layout_of(REAL[:, None, None], 3, 4)
    assert layout is not None and not layout.ends_with_padding() and layout.with_padding() is None
    assert layout.bias(torch.zeros(1, 2, 4, 4), 2) is None
    full = layout_of(None, 3, 4)
    assert full is not None and full.with_padding() is full


def test_biases_are_those_of_all_rows() -> None:
    layout, bias = layout_of(RIGHT[:, None, None], 3, 6), torch.randn(1, 2, 6, 6)
    assert layout is not None
    for given in (bias, bias.expand(3, -1, -1, -1), bias.repeat(3, 1, 1, 1), bias.transpose(2, 3).contiguous().mT):
        found = layout.bias(given, 2)
        assert found is not None and found.given is given and torch.equal(found.table, bias[0])
        assert found.table.is_contiguous()
    half = layout.bias(bias.bfloat16(), 2)
    assert half is not None and torch.equal(half.table, bias[0].bfloat16().float())
    other = bias.repeat(3, 1, 1, 1)
    other[2, 1, 5, 0] += 1
    for given in (other, bias[:, :, :5], bias[:, :1], bias.repeat(2, 1, 1, 1), bias.long(), bias[0], 0.5, None):
        assert layout.bias(given, 2) is None
