"""The inverse of the cumulative sum over many blocks, against Python's own accumulate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hf_accel.generation.speculation.verifiers import inverse

ONE = 1 - 2.0**-53


def inverse_draw(weights: Tensor, uniforms: Sequence[float]) -> list[int]:
    return inverse.inverse_draw(weights, torch.tensor(uniforms, dtype=torch.float64)).read()


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_first_index_beyond_the_share(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(50, size, generator=generator) * (torch.rand(50, size, generator=generator) < 0.3)
    weights[:, size // 2] += 0.1
    uniforms = [0.0, ONE, *torch.rand(48, generator=generator, dtype=torch.float64).tolist()]
    for row, u, got in zip(weights.tolist(), uniforms, inverse_draw(weights, uniforms), strict=True):
        sums = list(itertools.accumulate(row))
        possible = [token for token, weight in enumerate(row) if weight]
        assert got == next((token for token in possible if sums[token] > u * sums[-1]), possible[-1])


@pytest.mark.parametrize("size", [5, 128, 384, 1000])
def test_how_the_weights_lie_in_memory_does_not_matter(size: int) -> None:
    weights = torch.rand(7, size)
    uniforms = torch.rand(7, dtype=torch.float64).tolist()
    expected = [inverse_draw(row[None], [u])[0] for row, u in zip(weights, uniforms, strict=True)]
    assert inverse_draw(weights, uniforms) == expected
    assert inverse_draw(weights.t().contiguous().t(), uniforms) == expected
    assert inverse_draw(weights.repeat_interleave(2, 1)[:, ::2], uniforms) == expected
