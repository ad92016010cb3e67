from __future__ import annotations

import pytest
import torch

from hf_accel.linear import Int8Weight
from hf_accel.linear.backends.torch_int8 import ALIGNMENT, TorchInt8, aligned

from ..specs import linear_spec

SPEC = {"in_features": 48, "out_features": 33, "bits": 8, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({}, None),
        ({"activations": None}, None),
        ({"device_type": "cuda"}, "it runs on cpu, not on cuda"),
        ({"activations": "int8"}, "it keeps activations in floating point"),
        ({"dtype": torch.float32}, "it takes bfloat16, not torch.float32"),
        ({"in_features": 40}, "it needs inputs in multiples of 16, not 40"),
    ],
)
def test_refuses(keywords, reason):
    assert TorchInt8().refuses(linear_spec(**(SPEC | keywords))) == reason


@pytest.mark.parametrize("offset", [0, 1, 7, 32])
def test_views_and_file_mappings_are_moved_to_aligned_memory(offset):
    values = torch.arange(200).to(torch.bfloat16)[offset : offset + 96].view(2, 48)
    got = aligned(values)
    assert got.data_ptr() % ALIGNMENT == 0
    assert torch.equal(got, values)


def test_what_is_aligned_is_not_copied():
    values = torch.zeros(4, 64)
    assert aligned(values) is values


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_an_unaligned_input_and_weight_give_the_same(rows):
    integers = torch.randint(-127, 128, (33 * 48 + 1,), dtype=torch.int8)[1:].view(33, 48)
    x = torch.randn(rows * 48 + 1).to(torch.bfloat16)[1:].view(rows, 48)
    scale = torch.rand(33, 1).to(torch.bfloat16)
    got = TorchInt8().run(x, TorchInt8().pack(Int8Weight(integers, scale)), None)
    expected = TorchInt8().run(x.clone(), TorchInt8().pack(Int8Weight(integers.clone(), scale)), None)
    assert torch.equal(got, expected)
