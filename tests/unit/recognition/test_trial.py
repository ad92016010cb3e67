"""Both are tried and compared: what agrees, what does not, and what the user has is left as it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_accel.recognition.trial import RandomNumbers, Tolerance, agree, difference, unwatched_twin


def test_the_share_of_numbers_that_differ() -> None:
    x, y = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 1.0 + 2**-23])
    assert difference(lambda: x, lambda: x) == 0
    assert difference(lambda: x, lambda: y, Tolerance(roundings=1)) == 0.25
    assert difference(lambda: (x, x), lambda: (y, y), Tolerance(roundings=1)) == 0.5
    assert difference(lambda: x, lambda: y) == math.inf


@pytest.mark.parametrize(
    ("tolerance", "agrees"),
    [
        (Tolerance(relative=0.1), False), (Tolerance(absolute=0.1), True), (Tolerance(of_largest=0.001), True),
        (Tolerance(of_largest=0.0001), False), (Tolerance(roundings=2), False),
    ],
)  # fmt: skip
def test_tolerances(tolerance: Tolerance, *, agrees: bool) -> None:
    x = torch.tensor([100.0, 0.0])
    assert agree(lambda: x, lambda: x + torch.tensor([0.0, 0.05]), tolerance) is agrees


def failing() -> Tensor:
    raise TypeError("another signature")


@pytest.mark.parametrize(
    "other",
    [
        failing, lambda: None, lambda: torch.ones(3), lambda: torch.ones(4, dtype=torch.float64),
        lambda: (torch.ones(4), torch.ones(4)), lambda: (), lambda: torch.full((4,), math.nan),
    ],
    ids=["fails", "None", "shape", "dtype", "two", "nothing", "nan"],
)  # fmt: skip
def test_what_cannot_be_compared_does_not_agree(other: Any) -> None:
    for first, second in ((other, lambda: torch.ones(4)), (lambda: torch.ones(4), other)):
        assert not agree(first, second, Tolerance(relative=1.0, absolute=10.0))


def test_random_numbers_are_the_same_and_the_users_stay() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(RandomNumbers()(5), RandomNumbers()(5))
    assert difference(lambda: torch.dropout(torch.ones(99), 0.5, True), lambda: torch.ones(99)) == math.inf
    assert torch.equal(torch.rand(2), expected)


def test_a_twin_is_not_watched_and_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    seen: list[int] = []
    module.register_forward_hook(lambda *given: seen.append(1))
    module.register_forward_pre_hook(lambda *given: seen.append(2))
    other = nn.Linear(2, 3)
    twin = unwatched_twin(module, _modules={"0": other})
    assert twin(torch.ones(1, 2)).shape == (1, 3)
    assert seen == []
    assert module[0] is not other
    assert len(module._forward_hooks) == len(module._forward_pre_hooks) == 1
