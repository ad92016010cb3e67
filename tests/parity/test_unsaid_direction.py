"""Encoders whose attention does not say if it is causal: torch's is, without a mask, and an eager one never is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import hf_accel
from hf_accel.kernels import cpu as kernels

from .test_encoders import SIZES, counted, undo_is_exact

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))

FAMILIES = ("LayoutLM", "MarkupLM", "Splinter", "ClapText", "AlignText")
TOKENS = {"bos_token_id": 0, "eos_token_id": 2}
STACK = {"EncoderStackCalls": 1, "layers": 3}


def build(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | TOKENS)
    model = getattr(transformers, f"{family}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so large that tokens see few others
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model


def batch(*, padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}


def same(stock: Any, ours: Any, given: dict[str, Tensor]) -> None:
    found, expected = ours(**given)[0], stock(**given)[0]
    real = given.get("attention_mask", torch.ones(2, 9)).bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_outputs_are_stocks(family: str) -> None:
    stock = build(family)
    for fuse in (True, False):
        ours = hf_accel.patch(copy.deepcopy(stock), weights=None, fuse=fuse)
        for padded in (False, True):
            given = batch(padded=padded)
            with counted() as calls:
                same(stock, ours, given)
            # MarkupLM adds -10,000 at padding, which is no mask that is known.
            assert +calls == ({} if not fuse or (padded and family == "MarkupLM") else STACK)
        ones = given | {"attention_mask": torch.ones_like(given["input_ids"])}
        same(stock, ours, ones)


@torch.no_grad()
def test_a_recorded_pass_is_stocks() -> None:
    stock, given = build("ClapText"), batch(padded=False)
    ours = hf_accel.patch(copy.deepcopy(stock), weights=None)
    layer, states = ours.encoder.layer[0], torch.randn(2, 9, 60)
    recorded = make_fx(lambda x: layer(x)[0])(states)
    torch.testing.assert_close(recorded(states), stock.encoder.layer[0](states)[0], rtol=1e-4, atol=2e-5)
    same(stock, ours, given)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_a_layer_without_a_mask_attends_as_stocks(implementation: str) -> None:
    """Without a mask, sdpa is causal for such a module, and eager is not."""
    stock = build("LayoutLM")
    stock.set_attn_implementation(implementation)
    ours, states = hf_accel.patch(copy.deepcopy(stock), weights=None), torch.randn(2, 9, 60)
    for first in (ours, stock):
        first.encoder.layer[0](states)
    with counted() as calls:
        found, expected = (model.encoder.layer[0](states) for model in (ours, stock))
    assert calls["layers"] == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    changed = states.clone()
    changed[:, -1] += 3
    moved = not torch.allclose(stock.encoder.layer[0](changed)[:, 0], expected[:, 0])
    assert moved == (implementation == "eager")


@pytest.mark.parametrize("family", ["LayoutLM", "ClapText"])
def test_undo_is_exact(family: str) -> None:
    undo_is_exact(build(family), batch(padded=True))
