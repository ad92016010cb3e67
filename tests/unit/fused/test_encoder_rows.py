"""Which masks say where tokens are, and how rows are taken out of a padded batch and put back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_accel.fused import encoder_programme
from hf_accel.fused.encoder_programme import layout_of

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
        monkeypatch.setattr(encoder_programme, "CALL_TOKENS", most)
        layout = layout_of(mask, 3, 4)
        assert layout is not None and [part.stop for part, _ in layout.calls] == ends
        assert all(starts.tolist()[-1] == part.stop - part.start for part, starts in layout.calls)
