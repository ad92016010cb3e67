"""The norm behind a recurrent layer and its gate in C++, against the same in torch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu.gated_norm import GateForm, gated_norm

GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reference(
    x: Tensor, gate: Tensor, weight: Tensor | None, *, parts: int, gate_first: bool, activation: str
) -> Tensor:
    """In float64, where x has the gate's dtype with the normalized x rounded to it."""
    gate, rounded = GATES[activation](gate.double()), x.dtype
    x = x.double()
    if weight is None:
        return x * gate
    x = x * gate if gate_first else x
    split = x.unflatten(1, (parts, -1))
    x = (split / (split.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1)
    x = (x if rounded is torch.float32 else x.to(rounded).double()) * weight.double()
    return x if gate_first else x * gate


@pytest.mark.parametrize(("width", "parts"), [(1, 1), (7, 1), (64, 4), (96, 3), (65, 5), (1000, 1)])
@pytest.mark.parametrize("activation", GATES)
def test_against_torch(width: int, parts: int, activation: str) -> None:
    for gate_first, of_gate, of_weight in product((True, False), DTYPES, (*DTYPES, None)):
        gate = torch.randn(5, width + 3).to(of_gate)[:, 2:-1]  # rows that do not stand end to end
        weight = None if of_weight is None else torch.randn(width).to(of_weight)
        for dtype in (
            {torch.float32, of_gate} if parts == 1 and weight is not None and not gate_first else {torch.float32}
        ):
            x = torch.randn(5, width).to(dtype)
            settings: dict[str, Any] = {"parts": parts, "gate_first": gate_first, "activation": activation}
            found = gated_norm(x, gate, weight, GateForm(1e-5, **settings))
            expected = reference(x, gate, weight, **settings)
            # A number in the middle of two of its dtype may be rounded to either.
            off = 2e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(found, expected.float(), rtol=off, atol=2e-5)
            rows = [gated_norm(x[i : i + 1], gate[i : i + 1], weight, GateForm(1e-5, **settings)) for i in range(5)]
            assert torch.equal(found, torch.cat(rows))


def test_a_gradient_is_refused() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(UnsupportedError, match="gradient"):
        gated_norm(x, x, None, GateForm(1e-5))
