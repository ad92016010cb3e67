from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hf_accel.linear.formats import KINDS, Float8Weight


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """One seed; one thread, since two that wait for each other on a busy machine take many times as long."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_weight():
    """A quantized weight, and the same numbers as a float64 array, made without the code under test.

    bits: 8, 4, 3 or 2, or "fp8".
    """

    def make(bits, out_features, in_features, *, group_size=32, dtype=torch.float32):
        if bits == "fp8":
            numbers = torch.randn(out_features, in_features).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
            scale = (torch.rand(out_features, 1) * 0.01 + 0.001).to(dtype)
            return Float8Weight(numbers, scale), numbers.double().numpy() * scale.double().numpy()
        half = 1 << bits - 1
        low, high, groups = (-127, 127, 1) if bits == 8 else (-half, half - 1, in_features // group_size)
        integers = torch.randint(low, high + 1, (out_features, in_features), dtype=torch.int8)
        scale = (torch.rand(out_features, groups) * 0.01 + 0.001).to(dtype)
        repeated = np.repeat(scale.double().numpy(), in_features // groups, axis=1)
        weight = KINDS[f"int{bits}"].from_integers(integers, scale)
        return weight, integers.numpy() * repeated

    return make
