"""Second derivatives of models whose own attention, the eager one, has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import hf_accel

from ...parity.families import build

LENGTH = 21  # more than the products take, so that torch's fused kernel computes it
MASKS = {"none": None, "left": [0] * 4 + [1] * 17, "right": [1] * 18 + [0] * 3}


def eager_model() -> Any:
    model: Any = build("llama")
    model.set_attn_implementation("eager")
    return model


def loss_of(model: Any, embedded: Tensor, mask: Any = None) -> Tensor:
    given = {} if mask is None else {"attention_mask": torch.tensor([mask])}
    logits: Tensor = model(inputs_embeds=embedded, use_cache=False, **given).logits
    return logits[:, 5:18].square().mean()


def penalty(model: Any, embedded: Tensor, mask: Any) -> list[Tensor]:
    """The gradient of a gradient's square, in what the first layers multiply by."""
    embedded = embedded.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss_of(model, embedded, mask), embedded, create_graph=True)
    names = ("q_proj", "v_proj", "gate_proj")
    weights = [weight for name, weight in model.named_parameters() if name.split(".")[-2] in names]
    return [first, *torch.autograd.grad(first.square().sum() * 1e6, weights)]


def along(model: Any, embedded: Tensor, mask: Any) -> list[Tensor]:
    return list(torch.func.jvp(lambda x: loss_of(model, x), (embedded,), (torch.ones_like(embedded),)))


def forwards(model: Any, embedded: Tensor, mask: Any) -> list[Tensor]:
    with forward_ad.dual_level():
        loss = loss_of(model, forward_ad.make_dual(embedded, torch.ones_like(embedded)), mask)
        return [forward_ad.unpack_dual(loss).tangent.clone()]


CASES: dict[str, tuple[Callable[..., list[Tensor]], str]] = {
    **{f"twice, {name}": (penalty, name) for name in MASKS},
    "jvp": (along, "none"),
    "dual numbers": (forwards, "left"),
}


@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_stock(case: str) -> None:
    derive, mask = CASES[case]
    stock = eager_model()
    model = hf_accel.patch(copy.deepcopy(stock), weights=None)
    torch.manual_seed(1)
    embedded = torch.randn(1, LENGTH, stock.config.hidden_size)
    expected, found = (derive(each, embedded, MASKS[mask]) for each in (stock, model))
    for got, wanted in zip(found, expected, strict=True):
        got, wanted = got.detach(), wanted.detach()
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))


def test_the_first_is_that_of_the_kernel() -> None:
    """Only a backward pass that is differentiated again computes the definition."""
    model = hf_accel.patch(eager_model(), weights=None)
    sdpa = hf_accel.patch(build("llama"), weights=None)
    embedded = torch.randn(1, LENGTH, model.config.hidden_size)
    first, other = (x.requires_grad_() for x in (embedded.clone(), embedded.clone()))
    loss_of(model, first).backward()
    loss_of(sdpa, other).backward()
    assert first.grad is not None and other.grad is not None
    torch.testing.assert_close(first.grad, other.grad, rtol=1e-5, atol=1e-8)
