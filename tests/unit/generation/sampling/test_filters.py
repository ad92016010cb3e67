"""Against transformers' warpers: equal scores, and so equal support, with ties, -inf and every size of vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_accel.generation.sampling import filters
from hf_accel.kernels import cpu

ROWS = 12


def scores(kind: str, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(ROWS, size, generator=generator) * 3
    if kind == "ties":
        return (values * 2).round() / 2
    if kind == "equal":
        return torch.zeros(ROWS, size)
    if kind == "infinite":
        return values.masked_fill(torch.rand(ROWS, size, generator=generator) < 0.7, -torch.inf).index_fill(
            1, torch.tensor([0]), 1.0
        )
    if kind == "peaked":
        return values * 4
    return values * 0.1 if kind == "flat" else values


KINDS = ["plain", "ties", "equal", "infinite", "peaked", "flat"]


@pytest.fixture(params=["kernel", "torch"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "refusal", lambda: "not here")
    elif cpu.refusal() is not None:
        pytest.skip(str(cpu.refusal()))


@pytest.mark.parametrize("size", [5, 300, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_top_p(kind: str, size: int) -> None:
    given = scores(kind, size)
    before = given.clone()
    for p in (0.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.9999999, 1.0):
        torch.testing.assert_close(filters.top_p(given, p), TopPLogitsWarper(p)(None, given), rtol=0, atol=0)
    assert torch.equal(given, before)


@pytest.mark.parametrize("size", [5, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_and_min_p(kind: str, size: int) -> None:
    given = scores(kind, size)
    for k in (1, 2, 50, 299, 1000):
        torch.testing.assert_close(filters.top_k(given, k), TopKLogitsWarper(k)(None, given), rtol=0, atol=0)
    for p in (0.0, 0.05, 0.5, 1.0):
        torch.testing.assert_close(filters.min_p(given, p), MinPLogitsWarper(p)(None, given), rtol=0, atol=0)


@pytest.mark.parametrize("size", [5, 300, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_and_top_p(kind: str, size: int) -> None:
    given = scores(kind, size)
    for k in (1, 2, 50, 299):
        for p in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0):
            expected = TopPLogitsWarper(p)(None, TopKLogitsWarper(k)(None, given))
            torch.testing.assert_close(filters.top_k_top_p(given, k, p), expected, rtol=0, atol=0)


def test_top_p_whose_bound_is_hit_exactly() -> None:
    """Masses of .5, .25, .125, ... make every sum a bound to the last bit."""
    given = torch.tensor([[0.5**n for n in range(1, 400)]], dtype=torch.float64).log().float().clamp(min=-80)
    for p in (0.5, 0.75, 0.875, 1 - 0.5**10, 1 - 0.5**16):
        torch.testing.assert_close(filters.top_p(given, p), TopPLogitsWarper(p)(None, given), rtol=0, atol=0)


def test_most_rows_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows = []

    def count(rows: Tensor, p: float) -> Tensor:
        sorted_rows.append(len(rows))
        return original(rows, p)

    original = filters.sorted_top_p
    monkeypatch.setattr(filters, "sorted_top_p", count)
    for kind in ("plain", "peaked"):
        filters.top_p(scores(kind, 5000), 0.9)
    assert sum(sorted_rows) <= 2
    filters.top_p(scores("equal", 5000), 0.9)
    assert sum(sorted_rows) >= ROWS
