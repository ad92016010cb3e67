"""The cross entropy of rows and its gradient, against torch's own in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as torchs

from hf_accel.kernels.cpu.cross_entropy import RowStatistics, cross_entropy, cross_entropy_gradient

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 3, 7, 8, 17, 33, 127, 1000, 20001]
FACTOR = 0.3


def both(logits: Tensor, labels: Tensor) -> tuple[RowStatistics, Tensor]:
    found, gradient = cross_entropy(logits, labels), logits.clone()
    cross_entropy_gradient(gradient, labels, found, FACTOR)
    return found, gradient


def exact(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.double().requires_grad_()
    losses = torchs(wide, labels, reduction="none", ignore_index=-1)
    return losses.detach(), torch.autograd.grad(losses.sum() * FACTOR, wide)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(size: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(6, size) * 4).to(dtype)
    labels = torch.randint(0, size, (6,))
    labels[2], labels[3] = -1, size - 1
    found, gradient = both(logits, labels)
    losses, expected = exact(logits, labels)
    torch.testing.assert_close(found.losses.double(), losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert found.losses[2] == 0 and not gradient[2].any()


@pytest.mark.parametrize("magnitude", [1e-3, 30.0, 3e4])
def test_small_and_large_logits(magnitude: float) -> None:
    logits, labels = torch.randn(4, 77) * magnitude, torch.randint(0, 77, (4,))
    found, gradient = both(logits, labels)
    losses, expected = exact(logits, labels)
    torch.testing.assert_close(found.losses.double(), losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-7)


def test_what_is_not_a_number() -> None:
    logits, labels = torch.randn(5, 40), torch.tensor([1, 2, 3, 4, 5])
    logits[0, 30], logits[1, 7], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, :20] = float("-inf")  # a vocabulary of which a part is masked
    found, gradient = both(logits, labels)
    losses, _ = exact(logits, labels)
    assert found.losses.isnan().tolist() == losses.isnan().tolist() == [True, True, True, False, False]
    assert found.losses[3] == losses[3] == float("inf")
    assert gradient[:3].isnan().any(-1).all() and not gradient[4].isnan().any()


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads() -> None:
    wide = torch.randn(90, 400)
    logits, labels = wide[:, 3:340], torch.randint(0, 337, (90,))
    found, gradient = both(logits, labels)
    one, other = both(logits[7:8], labels[7:8])
    assert torch.equal(one.losses, found.losses[7:8]) and torch.equal(other, gradient[7:8])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        again, other = both(logits, labels)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again.losses, found.losses) and torch.equal(other, gradient)
    assert both(logits[:0], labels[:0])[1].shape == (0, 337)
