"""Several passes over pages: what each computes, and what comes back of each sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_accel.cache.group import PageGroup
from hf_accel.cache.pages import Pages
from hf_accel.cache.pass_rows import Parts, rows_of_passes
from hf_accel.cache.step import Step

PASSES = (((1, 2),), ((1, 1), (0, 3)), ((0, 1), (1, 2)))


@pytest.mark.parametrize("whole", [False, True])
def test_rows_come_back_by_sequence(whole: bool) -> None:
    group = PageGroup(
        window=None, num_blocks=9, block_size=2, growable=False, prefix_sharing=False, quantized=None
    )  # fmt: skip
    pages, attended = Pages([group]), []

    def compute(parts: Parts, step: Step) -> Tensor:
        attended.append(step.groups[0].ragged.kv_len.tolist())
        return torch.tensor([[10 * number + place] for number, span in parts for place in span])

    found = rows_of_passes(pages, [pages.begin(), pages.begin()], PASSES, compute, whole=whole)
    assert [rows.flatten().tolist() for rows in found] == [[0, 1, 2], [3], [10, 11], [12], [13, 14]]
    # Tokens that see each other are runs of their own, in the first pass of their sequence alone.
    assert attended == ([[2, 2], [3, 3, 3, 3], [4, 5]] if whole else [[2], [3, 3], [4, 5]])
