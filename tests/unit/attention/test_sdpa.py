from __future__ import annotations

import pytest

from hf_accel.attention.paged_kv import PagedSequence
from hf_accel.attention.sdpa import PRODUCT_ROWS, batches


def sequences(*sizes: tuple[int, int]) -> list[PagedSequence]:
    """From (queries, blocks) of each."""
    return [PagedSequence(number, 0, queries, 0, blocks, 0) for number, (queries, blocks) in enumerate(sizes)]


@pytest.mark.parametrize(
    "sizes, rows",
    [
        ([], []),
        ([(1, 5)], [[0]]),
        ([(1, 5), (1, 4), (1, 5)], [[1, 0, 2]]),
        ([(1, 5), (2, 5), (1, 5)], [[0, 2], [1]]),  # one product takes as many query rows of each
        ([(1, 1), (1, 50)], [[0], [1]]),  # padding 1 to 50 costs more than a call
        ([(1, 1), (1, 9), (1, 10), (1, 50)], [[0, 1, 2], [3]]),
        ([(PRODUCT_ROWS, 5), (PRODUCT_ROWS, 5)], [[0, 1]]),
        ([(PRODUCT_ROWS + 1, 5), (PRODUCT_ROWS + 1, 5)], [[0], [1]]),  # prefill runs sequence by sequence
        ([(1, 40), (1, 40), (1, 40)], [[0, 1], [2]]),  # three would gather too much at once
        ([(1, 400)], [[0]]),  # one too long for the limit still runs
    ],
)
def test_batches(sizes: list[tuple[int, int]], rows: list[list[int]]) -> None:
    found = batches(sequences(*sizes), max_blocks=100, max_padding=8)
    assert [[sequence.number for sequence in batch] for batch in found] == rows
