"""The products of a mixture's experts have the bits of IntegerLinear, expert by expert."""

from __future__ import annotations

import pytest
import torch

from hf_accel.config import WeightConfig
from hf_accel.kernels.cpu.integer_linear import IntegerExperts, IntegerLinear
from hf_accel.linear.backends.cpu import Cpu
from hf_accel.linear.methods import rtn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# bits, experts, outputs, inputs, group size of the weight, symmetric
SHAPES = [
    (8, 1, 1, 1, None, True), (8, 5, 37, 100, None, True), (8, 9, 64, 128, 128, True), (8, 3, 130, 300, None, True),
    (4, 4, 100, 192, 64, True), (4, 7, 65, 96, 32, False), (4, 2, 64, 256, 128, False),
    (3, 4, 100, 192, 64, True), (3, 7, 65, 96, 32, False), (2, 7, 65, 96, 32, True), (2, 2, 64, 256, 128, False),
]  # fmt: skip


def make(shape, dtype, generator):
    bits, experts, outputs, inputs, group, symmetric = shape
    config = WeightConfig(bits=bits, group_size=group, symmetric=symmetric)
    floats = torch.randn(experts, outputs, inputs, generator=generator).to(dtype)
    return [Cpu().pack(rtn.quantize(weight, config)).weight for weight in floats]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_each_expert_alone(isa, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    weights, experts = make(shape, dtype, generator), shape[1]
    biases = torch.randn(experts, shape[2], generator=generator).to(dtype)
    for number in range(8):
        counts = torch.randint(0, (2, 4, 40)[number % 3], (experts,), generator=generator)
        counts[torch.rand(experts, generator=generator) < 0.3] = 0
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        x = torch.randn(int(counts.sum()), shape[3], generator=generator).to(dtype)
        given = biases if number % 2 else None
        got = IntegerExperts(weights, given).grouped(x, starts)
        parts = [
            IntegerLinear([weight], [None if given is None else given[i]])(part)
            for i, (weight, part) in enumerate(zip(weights, torch.split(x, counts.tolist()), strict=True))
        ]
        assert torch.equal(got, torch.cat(parts))


def test_any_number_of_threads_gives_the_same_bits(isa):
    generator = torch.Generator().manual_seed(0)
    weights = make((8, 6, 200, 160, None, True), torch.bfloat16, generator)
    starts = torch.tensor([0, 1, 1, 30, 31, 90, 100])
    x = torch.randn(100, 160, generator=generator).bfloat16()
    before, results = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(IntegerExperts(weights, None).grouped(x, starts))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_a_bias_that_was_moved_is_read_where_it_is(isa):
    generator = torch.Generator().manual_seed(0)
    weights, biases = make((8, 2, 8, 16, None, True), torch.float32, generator), torch.nn.Parameter(torch.zeros(2, 8))
    call = IntegerExperts(weights, biases)
    x, starts = torch.zeros(2, 16), torch.tensor([0, 1, 2])
    with torch.no_grad():
        assert torch.equal(call.grouped(x, starts), torch.zeros(2, 8))
        biases.data = torch.arange(16.0).view(2, 8)
        assert torch.equal(call.grouped(x, starts), biases)
