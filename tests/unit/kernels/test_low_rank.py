"""The grouped low-rank product against plain torch, over odd sizes and mixes of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_accel.kernels.cpu.integer_linear import by_block, by_output
from hf_accel.kernels.cpu.low_rank import GROUP_ROWS, RowGroups
from hf_accel.linear.adapters import Adapter, LowRankPart, PassAdapters

SIZES = [(1, 1, 1), (7, 65, 3), (64, 64, 8), (131, 200, 16), (300, 67, 33), (96, 129, 64)]


def made(inputs: int, outputs: int, rank: int, *, seed: int, dtype: torch.dtype) -> LowRankPart:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(size, generator=generator).to(dtype) for size in ((rank, inputs), (outputs, rank)))
    return LowRankPart(a, b, 0.37)


def added(layer: nn.Linear, given: list[tuple[Adapter, list[int]]], x: Tensor) -> Tensor:
    """What the layer returns in a pass with these adapters."""
    running = PassAdapters(given, len(x))
    with running.hooked([layer]):
        found = layer(x)
    running.check_added()
    return found


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_against_torch(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    inputs, outputs, rank = size
    layer = nn.Linear(inputs, outputs, dtype=dtype)
    parts = [made(inputs, outputs, 1 + (rank + 5 * seed) % 65, seed=seed, dtype=dtype) for seed in range(3)]
    first, second, third = (Adapter(str(part), {layer: part}, frozenset(), b"") for part in parts)
    untouched = Adapter("of another layer", {}, frozenset(), b"")
    given = [(first, [1, 5, 6]), (third, [*range(7, 10 + GROUP_ROWS)]), (second, [0]), (untouched, [2, 3])]
    x = torch.randn(30, inputs, generator=torch.Generator().manual_seed(9)).to(dtype)
    base = layer(x)
    expected = base.clone()
    for (adapter, rows), part in zip(given, (parts[0], parts[2], parts[1]), strict=False):
        assert adapter.parts[layer] is part
        expected[rows] = (base[rows].float() + part(x[rows])).to(dtype)
    found = added(layer, given, x)
    assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * max(1, expected.abs().max())
    assert torch.equal(found[[2, 3, 4, 26, 27, 28, 29]], base[[2, 3, 4, 26, 27, 28, 29]])
    threads = torch.get_num_threads()
    try:
        for number in (1, 3):  # one reads b behind a, three take parts of b
            torch.set_num_threads(number)
            assert torch.equal(added(layer, given, x), found), number
    finally:
        torch.set_num_threads(threads)
    few = [(first, [5]), (third, [7, 25]), (second, [0])]
    assert torch.equal(added(layer, few, x)[[5, 7, 25, 0]], found[[5, 7, 25, 0]]), "a row depends on others"


def test_packing() -> None:
    for size in ((1, 1), (63, 2), (64, 5), (130, 7)):
        matrix = torch.randn(size)
        assert torch.equal(by_output(by_block(matrix), size[0]), matrix)
    groups = RowGroups.of([[3, 4], list(range(10, 30)), [0]])
    assert groups.groups.tolist() == [[0, 0, 2], [1, 2, 16], [1, 18, 4], [2, 22, 1]]
    assert groups.rows.tolist() == [3, 4, *range(10, 30), 0]


def test_elsewhere_matrices_are_held_as_they_are() -> None:
    """And no memory of the CPU is made for them."""
    part = LowRankPart(torch.ones(3, 70, device="meta"), torch.ones(65, 3, device="meta"), 0.5)
    LowRankPart.put_together([part])
    found = part(torch.ones(4, 70, device="meta", dtype=torch.bfloat16))
    assert found.shape == (4, 65) and found.dtype is torch.float32 and found.is_meta
    assert part.num_bytes == 3 * (70 + 65) * 4
