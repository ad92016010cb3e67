"""The memory of a layer's native call: buffers that are needed at the same time do not overlap, others may."""

from __future__ import annotations

import random

import pytest

from hf_accel.fused.layer_programme import ALIGNED, buffer_starts
from hf_accel.kernels.cpu.layer_call import Columns, LayerOp


def place(buffer: int) -> Columns:
    return Columns(buffer, 0, 1)


@pytest.mark.parametrize("seed", range(20))
def test_buffers_in_use_are_apart(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(3, 9)
    widths = [16, 16, *(rng.randrange(1, 200) for _ in range(count))]
    operations, written = [], [0]
    for index in range(count):  # each reads what was written before, and writes one more
        reads = [place(rng.choice(written)) for _ in range(3)]
        operations.append(LayerOp(x=reads[0], y=reads[1], z=reads[2], out=place(index + 2)))
        written.append(index + 2)
    operations.append(LayerOp(x=place(written[-1]), out=place(1)))

    starts, total = buffer_starts(operations, widths)

    used: dict[int, set[int]] = {}
    for index, operation in enumerate(operations):
        for each in (operation.x, operation.y, operation.z, operation.out):
            if each.stride:
                used.setdefault(each.buffer, set()).add(index)
    for buffer in range(2, len(widths)):
        assert starts[buffer] % ALIGNED == 0 and starts[buffer] + widths[buffer] <= total
        for other in range(2, buffer):
            if min(used[buffer]) <= max(used[other]) and min(used[other]) <= max(used[buffer]):
                ends = starts[buffer] + widths[buffer], starts[other] + widths[other]
                assert ends[0] <= starts[other] or ends[1] <= starts[buffer]


def test_buffers_share_memory_one_after_the_other() -> None:
    chain = [LayerOp(x=place(0), out=place(2)), *(LayerOp(x=place(n), out=place(n + 1)) for n in range(2, 9))]
    starts, total = buffer_starts(chain, [64] * 10)
    assert total == 128 and set(starts) == {0, 64}


def test_the_second_place_of_an_operation_is_kept() -> None:
    operations = [
        LayerOp(x=place(0), out=place(2), out2=place(3)),
        LayerOp(x=place(2), out=place(4)),
        LayerOp(x=place(3), y=place(4), out=place(1)),
    ]
    starts, _ = buffer_starts(operations, [32] * 5)
    assert starts[3] not in (starts[2], starts[4])
