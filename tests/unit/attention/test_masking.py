from __future__ import annotations

import pytest
import torch

from hf_accel.attention.masking import apply_mask, restrict, row_blocks, visible, visible_keys
from hf_accel.kernels.layouts import KV, AttentionOptions

INF = float("inf")


@pytest.mark.parametrize(
    "causal, window, rows",
    [
        (True, None, ["11100", "11110", "11111"]),
        (True, 2, ["01100", "00110", "00011"]),
        (False, None, ["11111", "11111", "11111"]),
        (False, 2, ["01111", "00111", "00011"]),
        (True, 99, ["11100", "11110", "11111"]),
    ],
)
def test_visible(causal: bool, window: int | None, rows: list[str]) -> None:
    seen = visible(torch.arange(2, 5), torch.arange(5), causal=causal, window=window)
    assert ["".join(str(int(x)) for x in row) for row in seen] == rows


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 50])
@pytest.mark.parametrize("num_queries, num_keys", [(1, 1), (1, 9), (6, 9), (9, 9), (9, 4), (3, 0)])
def test_visible_keys_is_the_tightest_range(num_queries: int, num_keys: int, window: int | None, causal: bool) -> None:
    positions = torch.arange(num_keys - num_queries, num_keys)
    seen = visible(positions, torch.arange(num_keys), causal=causal, window=window)
    for start in range(num_queries):
        for stop in range(start + 1, num_queries + 1):
            some = seen[start:stop].any(0).nonzero().flatten().tolist()
            keys = visible_keys(
                range(start, stop), num_queries=num_queries, num_keys=num_keys, causal=causal, window=window
            )
            assert list(keys) == some


def test_restrict_keeps_the_kind_of_mask() -> None:
    seen = torch.tensor([True, True, False])
    assert restrict(None, seen) is seen
    assert restrict(torch.tensor([True, False, True]), seen).tolist() == [True, False, False]
    assert restrict(torch.tensor([0.5, -INF, 1.0]), seen).tolist() == [0.5, -INF, -INF]


def test_apply_mask_hides_even_garbage() -> None:
    scores = torch.tensor([1.0, 2.0, float("nan")])
    assert apply_mask(scores, torch.tensor([True, False, False])).tolist() == [1.0, -INF, -INF]
    assert apply_mask(scores, torch.tensor([0.5, -INF, -INF])).tolist() == [1.5, -INF, -INF]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("causal, window", [(True, None), (True, 3), (False, 3), (False, None)])
def test_row_blocks_hold_every_visible_pair_once(size: int, causal: bool, window: int | None) -> None:
    num_queries, num_keys = 4, 7
    q, k = torch.arange(4.0).view(1, 1, 4, 1), torch.arange(7.0).view(1, 1, 7, 1)
    pairs = []
    options = AttentionOptions(scale=1.0, causal=causal, window=window)
    for block_q, (block_k, block_v, *_), mask in row_blocks(q, KV(k, k + 10), None, options, size=size):
        assert block_q.shape[2] <= size and torch.equal(block_k + 10, block_v)
        for i, query in enumerate(block_q.flatten().tolist()):
            keys = enumerate(block_k.flatten().tolist())
            pairs += [(query, key) for j, key in keys if mask is None or mask[i, j]]
    seen = visible(torch.arange(3, 7), torch.arange(7), causal=causal, window=window)
    assert pairs == [(i, j) for i in range(num_queries) for j in range(num_keys) if seen[i, j]]
