"""How many reserved tokens hold nothing, over exponentially distributed lengths with a mean of 500."""

from __future__ import annotations

import random

import pytest

from hf_accel.cache.pool import BlockPool, BlockTable


def lengths() -> list[int]:
    generator = random.Random(0)
    return [1 + int(generator.expovariate(1 / 500)) for _ in range(2000)]


def waste(block_size: int) -> float:
    pool = BlockPool(1, block_size=block_size, growable=True)
    for length in lengths():
        BlockTable(pool).append(length)
    return 1 - sum(lengths()) / (pool.num_used * block_size)


@pytest.mark.parametrize(("block_size", "low", "high"), [(16, 0.01, 0.02), (256, 0.15, 0.25)])
def test_paged(block_size: int, low: float, high: float) -> None:
    assert low < waste(block_size) < high


def test_reserving_the_maximum() -> None:
    assert 0.6 < 1 - sum(lengths()) / (len(lengths()) * max(lengths())) < 0.95
