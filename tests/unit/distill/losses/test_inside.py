"""Transfer from inside a teacher, against loops over tokens and heads in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_accel.distill.losses import inside
from hf_accel.distill.losses.inside import NOWHERE, hidden_loss, relation_heads, relation_loss, uniform_layer_map
from hf_accel.errors import UnsupportedError


def test_layers_are_mapped_evenly_and_last_to_last() -> None:
    assert uniform_layer_map(3, 12) == {1: 4, 2: 8, 3: 12}
    assert uniform_layer_map(4, 6) == {1: 2, 2: 3, 3: 4, 4: 6}  # round() goes to even
    assert uniform_layer_map(4, 1) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_hidden_mse_is_relative_to_the_teachers_length() -> None:
    s, t = torch.tensor([[[1.0, 2.0], [9.0, 9.0]]]), torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])
    assert hidden_loss(s, t, torch.tensor([[1.0, 0.0]]), "mse").item() == pytest.approx(8 / 25)
    scaled = hidden_loss(s * 100, t * 100, torch.tensor([[0.5, 0.0]]), "mse")
    assert scaled.item() == pytest.approx(4 / 25)


def test_hidden_cosine_sees_directions_alone() -> None:
    s, t = torch.tensor([[[2.0, 0.0], [0.0, 3.0]]]), torch.tensor([[[5.0, 0.0], [1.0, 0.0]]])
    assert hidden_loss(s, t, torch.ones(1, 2), "cosine").item() == pytest.approx(1.0)


def test_a_teacher_of_zeros_gives_a_finite_loss() -> None:
    s = torch.zeros(1, 1, 4, requires_grad=True)
    hidden_loss(s, torch.zeros(1, 1, 4), torch.ones(1, 1), "mse").backward()
    assert torch.isfinite(s.grad).all()


def expected_relations(
    s: Tensor, t: Tensor, weights: Tensor, documents: Tensor, *, heads: int, causal: bool
) -> Tensor:
    """Token by token and head by head, over lists of those that are seen."""
    total = torch.zeros((), dtype=torch.float64)
    for b in range(len(s)):
        for i in range(s.shape[1]):
            if not weights[b, i]:
                continue
            document = documents[b, i].item()
            seen = [k for k in range(s.shape[1]) if documents[b, k] == document and (k <= i or not causal)]
            for h in range(heads):
                rows = []
                for x in (s, t):
                    width = x.shape[-1] // heads
                    part = x[b, :, h * width : (h + 1) * width]
                    rows.append(torch.log_softmax((part[seen] @ part[i]) / width**0.5, -1))
                total = total + weights[b, i] * (rows[1].exp() * (rows[1] - rows[0])).sum() / heads
    return total


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_relations_are_those_of_a_loop(causal: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces of some query rows; with padding on the left, packed texts, and other widths."""
    batch, length, heads = 2, 7, 3
    s = torch.randn(batch, length, 12, dtype=torch.float64).requires_grad_()
    t = torch.randn(batch, length, 24, dtype=torch.float64)
    documents = torch.tensor([[1, 1, 1, 2, 2, 2, 2], [NOWHERE, NOWHERE, 1, 1, 1, 1, 1]])
    weights = torch.tensor([[0, 1, 1, 0, 1, 0.5, 0], [0, 0, 1, 1, 0, 1, 1]])
    expected = expected_relations(s, t, weights, documents, heads=heads, causal=causal)
    monkeypatch.setattr(inside, "RELATION_BYTES", rows * 4 * batch * heads * length)
    found = relation_loss(s, t, weights, documents, heads=heads, causal=causal)
    gradients = [torch.autograd.grad(value, s)[0] for value in (expected, found)]
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_relations_hold_no_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the size of [B, R, T, T] is kept for the backward pass."""
    batch, length, heads = 2, 128, 4
    s = torch.randn(batch, length, 4, requires_grad=True)
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    monkeypatch.setattr(inside, "RELATION_BYTES", 8 * 4 * batch * heads * length)
    arguments = (s, torch.randn(batch, length, 4), torch.ones(batch, length), torch.zeros(batch, length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        relation_loss(*arguments, heads=heads, causal=True)
    assert sum(kept) < batch * heads * length * length


def test_equal_relations_are_no_loss() -> None:
    x = torch.randn(1, 5, 8)
    loss = relation_loss(x.clone().requires_grad_(), x, torch.ones(1, 5), torch.zeros(1, 5), heads=2, causal=True)
    assert loss.item() == pytest.approx(0, abs=1e-6)


def test_heads_divide_every_width() -> None:
    assert relation_heads([64, 32, 96], None) == 8
    assert relation_heads([64, 32], 16) == 16
    with pytest.raises(UnsupportedError, match="does not divide the widths \\[32, 48\\]"):
        relation_heads([48, 32], 32)
