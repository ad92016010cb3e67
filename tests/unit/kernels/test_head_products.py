"""Products of each head with weights of its own, in C++, against the same in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.head_products import OF_OUTPUTS, head_products, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (3, 17), (16, 16), (33, 40), (130, 300)]  # inputs and outputs of a head


def operands(tokens: int, heads: int, inputs: int, outputs: int, *, transposed: bool) -> tuple[Tensor, Tensor]:
    """x and the weight, as parts of larger tensors, as they are of queries and of a linear layer."""
    rows = (inputs, outputs) if transposed else (outputs, inputs)
    return torch.randn(tokens, heads, inputs + 3)[..., 1:-2], torch.randn(heads, rows[0] + 5, rows[1])[:, 2:-3]


def product(x: Tensor, weight: Tensor, outputs: int, **other: Any) -> Tensor:
    """The product, written to a part of a larger tensor whose other numbers stay as they are."""
    whole = torch.full((*x.shape[:2], outputs + 4), 7.0, dtype=x.dtype)
    head_products(x, weight, out=whole[..., 2:-2], **other)
    assert (whole[..., :2] == 7).all() and (whole[..., -2:] == 7).all()
    return whole[..., 2:-2]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 9, 17])
def test_floats(tokens: int, inputs: int, outputs: int, dtype: torch.dtype, transposed: bool) -> None:
    x, weight = operands(tokens, 3, inputs, outputs, transposed=transposed)
    for kind in {dtype, torch.float32}:
        given = x.to(dtype), weight.to(kind)
        found, expected = product(*given, outputs, transposed=transposed), reference(*given, transposed=transposed)
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_scales_of_outputs_give_the_bits_of_scales_of_rows(inputs: int, outputs: int, tokens: int) -> None:
    x, weight = operands(tokens, 3, inputs, outputs, transposed=False)
    levels, scales = (weight * 40).round().clamp(-127, 127).to(torch.int8), torch.rand(3, outputs) * 0.1
    transposed = levels.transpose(1, 2).contiguous()
    found = product(x, transposed, outputs, scales=scales, transposed=OF_OUTPUTS)
    assert torch.equal(found, product(x, levels, outputs, scales=scales))
    expected = reference(x, transposed, scales=scales, transposed=OF_OUTPUTS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_int8(inputs: int, outputs: int, transposed: bool) -> None:
    x, weight = operands(5, 3, inputs, outputs, transposed=transposed)
    levels = (weight * 40).round().clamp(-127, 127).to(torch.int8)
    scales = torch.rand(3, weight.shape[1] + 2)[:, 1:-1] * 0.1
    found = product(x, levels, outputs, scales=scales, transposed=transposed)
    expected = reference(x, levels, scales=scales, transposed=transposed)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_other_tokens(dtype: torch.dtype, transposed: bool) -> None:
    x, weight = operands(37, 2, 70, 50, transposed=transposed)
    x, weight = x.to(dtype), weight.to(dtype)
    whole = product(x, weight, 50, transposed=transposed)
    for count in (1, 5):
        parts = [product(part, weight, 50, transposed=transposed) for part in x.split(count)]
        assert torch.equal(torch.cat(parts), whole)


def test_gradients_are_refused() -> None:
    x = torch.randn(1, 1, 4, requires_grad=True)
    with pytest.raises(UnsupportedError, match="head_products"):
        head_products(x, torch.randn(1, 4, 4), out=torch.empty(1, 1, 4))
