"""Heads of pages that hold several heads of a cache, against attention over the heads as code reads them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_accel.attention.hf.page_heads import PageHeads, Pairs, page_heads, shared_out
from hf_accel.recognition.operation import UntraceableError


@pytest.mark.parametrize(
    ("pairs", "sets"),
    [
        (Pairs((0, 0, 1, 1), (0, 0, 1, 1)), ((0,), (1,))),
        (Pairs((0, 1, 0, 1), (0, 1, 0, 1)), ((0,), (1,))),  # JetMoe
        (Pairs((0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 1, 1, 0, 0, 1, 1)), ((0, 2), (1, 3))),  # DiffLlama
        (Pairs((0, 1, 2, 3), (2, 3, 2, 3)), ((0, 2), (1, 3))),
    ],
)
def test_attention_over_the_heads_of_pages(pairs: Pairs, sets: tuple[tuple[int, ...], ...]) -> None:
    torch.manual_seed(0)
    count = 1 + max(*pairs.keys, *pairs.values)
    q = torch.randn(1, len(pairs.keys), 5, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, count, 5, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k[:, list(pairs.keys)], v[:, list(pairs.values)], scale=0.3)
    heads = page_heads(pairs, count)
    assert heads.sets == sets
    reading, groups = heads.reading(pairs), len(pairs.keys) // len(sets)
    keys, values = (heads.stored(x).repeat_interleave(groups, dim=1) for x in (k, v))
    found = F.scaled_dot_product_attention(reading.queries(q), keys, values, scale=0.3)
    torch.testing.assert_close(reading.results(found), expected)


def test_heads_as_the_cache_has_them_are_stored_as_they_are() -> None:
    heads = page_heads(Pairs((0, 0, 1, 1), (0, 0, 1, 1)), 2)
    x = torch.randn(1, 2, 3, 4)
    assert heads.is_plain and heads.stored(x) is x
    q = torch.randn(1, 4, 3, 4)
    assert heads.reading(Pairs((0, 0, 1, 1), (0, 0, 1, 1))).queries(q) is q


def test_what_pages_cannot_hold_is_not_known() -> None:
    with pytest.raises(UntraceableError, match="not all in the same way"):
        page_heads(Pairs((0, 1, 2), (1, 0, 2)), 3)
    with pytest.raises(UntraceableError, match="not as many queries"):
        PageHeads(((0,), (1,))).reading(Pairs((0, 0, 1), (0, 0, 1)))
    with pytest.raises(UntraceableError, match="not stored together"):
        PageHeads(((0,), (1,))).reading(Pairs((0, 1), (1, 0)))
    with pytest.raises(UntraceableError, match="no multiple"):
        shared_out((0, 1), 3)
