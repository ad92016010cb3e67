"""Short causal convolutions in C++, against the same in torch and against torch's convolution."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.short_conv import ConvInputs, reference, short_conv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NONE = -1


def places(counts: list[int], before: list[int], slots: list[int]) -> dict[str, Tensor]:
    starts = torch.tensor([0, *counts]).cumsum(0)
    return {"starts": starts, "before": torch.tensor(before), "slots": torch.tensor(slots)}


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [2, 3, 4, 7])
@pytest.mark.parametrize("channels", [1, 7, 16, 33, 300])
def test_sequences_of_several_lengths(channels: int, length: int, dtype: torch.dtype) -> None:
    """A new one, one that goes on, and one of whose tokens the inputs are kept; slots of others stay as they are."""
    x, weight = torch.randn(9, channels).to(dtype), torch.randn(channels, length).to(dtype)
    inputs = ConvInputs(x, weight, torch.randn(channels).to(dtype) if channels % 2 else None)
    given = places([5, 1, 3], [NONE, 4, 1], [NONE, NONE, NONE, NONE, 0, 2, 3, 5, 6])
    expected = torch.randn(8, length - 1, channels).to(dtype).float()
    found = expected.clone()
    near(short_conv(inputs, kept=found, **given), reference(inputs, kept=expected, **given), dtype)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_pass(dtype: torch.dtype) -> None:
    x, other, kept = torch.randn(9, 40).to(dtype), (torch.randn(40, 4), torch.randn(40)), torch.zeros(12, 3, 40)
    whole = short_conv(ConvInputs(x, *other), kept=kept, **places([9], [NONE], [NONE] * 8 + [0]))
    steps = [
        short_conv(ConvInputs(x[t : t + 1], *other), kept=kept, **places([1], [t if t else NONE], [t + 1]))
        for t in range(9)
    ]
    assert torch.equal(torch.cat(steps), whole) and torch.equal(kept[9], kept[0])


@pytest.mark.usefixtures("isa")
def test_it_is_torchs_convolution() -> None:
    x, weight, bias = torch.randn(20, 48), torch.randn(48, 4), torch.randn(48)
    expected = F.silu(F.conv1d(x.t()[None], weight[:, None], bias, padding=3, groups=48)[0, :, :20].t())
    parts = torch.randn(20, 60)
    parts[:, :48] = x
    given = ConvInputs(parts[:, :48], weight, bias)
    found = short_conv(given, kept=torch.zeros(1, 3, 48), **places([20], [NONE], [NONE] * 20))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_are_refused() -> None:
    x = torch.randn(1, 4, requires_grad=True)
    with pytest.raises(UnsupportedError, match="short_conv: the cpu kernel has no gradient"):
        short_conv(ConvInputs(x, torch.randn(4, 2)), kept=torch.zeros(1, 1, 4), **places([1], [NONE], [NONE]))
