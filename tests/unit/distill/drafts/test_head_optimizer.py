"""The optimizer of a head: which parameters each rule moves and how far, and that schedules and copies reach both."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hf_accel.distill.drafts.head_optimizer import OTHERS_SHARE, HeadOptimizer
from hf_accel.distill.drafts.heads import DraftHead

from ....parity.families import VOCABULARY, build

RATE = 0.01


def trained(family: str, tokens: list[int] | None = None) -> tuple[DraftHead, dict[str, nn.Parameter]]:
    head = DraftHead.of(build(family), tokens=tokens).float()
    return head, {name: own for name, own in head.named_parameters() if own.requires_grad}


def set_gradients(parameters: dict[str, nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


@pytest.mark.parametrize("family, tokens", [("llama", None), ("llama", list(range(0, VOCABULARY, 2))), ("gpt2", None)])
def test_matrices_are_moved_evenly_in_all_directions_and_the_rest_as_by_adamw(
    family: str, tokens: list[int] | None
) -> None:
    head, parameters = trained(family, tokens)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    set_gradients(parameters, 0)
    HeadOptimizer(head, RATE).step()
    counts = {"matrix": 0, "other": 0}
    for name, parameter in parameters.items():
        moved = before[name] - parameter.detach()
        if parameter.ndim == 2 and not name.startswith("words"):
            values = torch.linalg.svdvals(moved) / (RATE * 0.2 * max(moved.shape) ** 0.5)
            assert values.min() > 0.3 and values.max() < 1.5, name  # five steps of Newton and Schulz
            counts["matrix"] += 1
        else:  # the first step of AdamW is the sign of the gradient
            torch.testing.assert_close(moved, OTHERS_SHARE * RATE * parameter.grad.sign(), rtol=1e-3, atol=1e-6)
            counts["other"] += 1
    assert counts["matrix"] > 5 and counts["other"] > 3 and ("words.weight" in parameters) is (tokens is not None)


def test_a_schedule_reaches_all_parameters() -> None:
    head, parameters = trained("llama")
    optimizer = HeadOptimizer(head, RATE)
    schedule = LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    set_gradients(parameters, 0)
    optimizer.step()
    schedule.step()
    before = copy.deepcopy(parameters)
    set_gradients(parameters, 1)
    optimizer.step()
    assert all(torch.equal(before[name], parameters[name]) for name in parameters)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters.values())


def test_a_copy_that_takes_over_the_state_takes_the_same_steps() -> None:
    head, parameters = trained("llama")
    first = HeadOptimizer(head, RATE)
    set_gradients(parameters, 0)
    first.step()
    again = copy.deepcopy(head)
    second = HeadOptimizer(again, 2 * RATE)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer, own in ((first, head), (second, again)):
        set_gradients({n: p for n, p in own.named_parameters() if p.requires_grad}, 1)
        optimizer.param_groups[0]["lr"] = RATE / 2
        optimizer.step()
    for mine, other in zip(head.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other)
