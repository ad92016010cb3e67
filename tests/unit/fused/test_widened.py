"""Conv1Ds in half precision that are multiplied in float32: stock's numbers but for rounding, or stock."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import hf_accel
from hf_accel.fused import projections
from hf_accel.fused.hf.sites import fused_sites
from hf_accel.fused.projections import WidenedConv1D, is_slow_in_torch, widened_product
from hf_accel.fused.site import Dropped, FusedSite
from hf_accel.kernels import cpu as kernels
from hf_accel.undo.journal import mixed_class
from tests.parity.families import build

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def slow_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without instructions for halves."""
    monkeypatch.setattr(projections, "has_instructions", lambda dtype: False)
    monkeypatch.setattr(projections, "isa", lambda: "avx2")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of each product in float32."""
    rows: list[int] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(len(x))
        return widened_product(x, weight, bias)

    monkeypatch.setattr(projections, "widened_product", product)
    yield rows


def layer(inputs: int, outputs: int, dtype: torch.dtype) -> Conv1D:
    """Random, with the class that a patch gives it."""
    made = Conv1D(outputs, inputs).to(dtype).requires_grad_(False)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    made.__class__ = mixed_class(WidenedConv1D, Conv1D)
    return made


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (48, 144), (130, 67)])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (1, 40)], ids=str)
@pytest.mark.parametrize("most", [1, 300, 2**22])
@torch.no_grad()
def test_products_are_summed_wide_and_rounded_once(
    dtype: torch.dtype, inputs: int, outputs: int, shape: tuple[int, ...], most: int,
    monkeypatch: pytest.MonkeyPatch, calls: list[int],
) -> None:  # fmt: skip
    monkeypatch.setattr(projections, "WIDENED", most)
    module, x = layer(inputs, outputs, dtype), torch.randn(*shape, inputs).to(dtype)
    got = module(x)
    exact = x.double() @ module.weight.double() + module.bias.double()
    assert got.dtype is dtype
    assert calls == [x.numel() // inputs]
    size = x.double().abs() @ module.weight.double().abs() + module.bias.double().abs()
    error = (got.double() - exact).abs()
    assert bool((error <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5 * size + 1e-7).all())


@torch.no_grad()
def test_what_is_not_known_is_stocks(calls: list[int]) -> None:
    x = torch.randn(3, 8).bfloat16()
    single = layer(8, 4, torch.float32)
    assert torch.equal(single(x.float()), Conv1D.forward(single, x.float()))
    mixed = layer(8, 4, torch.bfloat16)
    mixed.bias.data = mixed.bias.data.half()
    for module, given in ((mixed, x), (layer(8, 4, torch.bfloat16), x.half()), (layer(9, 4, torch.bfloat16), x)):
        with pytest.raises(RuntimeError) as ours:
            module(given)
        with pytest.raises(RuntimeError) as stocks:
            Conv1D.forward(module, given)
        assert str(ours.value) == str(stocks.value)
    module = layer(8, 4, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), Conv1D.forward(module, x))
    assert module(x[:0]).shape == (0, 4)
    assert calls == []


def test_gradients_are_stocks(calls: list[int]) -> None:
    module, x = layer(8, 4, torch.bfloat16).requires_grad_(True), torch.randn(3, 8).bfloat16()
    module(x).sum().backward()
    expected = x.float().sum(0)[:, None].expand(8, 4)
    torch.testing.assert_close(module.weight.grad.float(), expected, atol=0.02, rtol=0.02)
    assert calls == []


@torch.no_grad()
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_is_widened_too(clone: Any, calls: list[int]) -> None:
    module, x = layer(8, 4, torch.bfloat16), torch.randn(3, 8).bfloat16()
    assert torch.equal(clone(module)(x), module(x))
    assert calls == [3, 3]


def sites(module: nn.Module) -> tuple[list[FusedSite], list[Dropped]]:
    return fused_sites(nn.ModuleList([module]), torch.bfloat16, 64)


class ScaledConv1D(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


ScaledConv1D.__name__ = "Conv1D"


def test_conv1ds_are_found_and_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    (site,), dropped = sites(Conv1D(5, 7).bfloat16())
    assert (site.kind.name, site.mixin, dropped) == ("conv1d", WidenedConv1D, [])
    found, (other,) = sites(ScaledConv1D(5, 7).bfloat16())
    assert found == []
    assert "differs" in other.reason
    assert sites(nn.Conv1d(5, 7, 1).bfloat16()) == ([], [])
    monkeypatch.setattr(projections, "has_instructions", lambda dtype: True)
    assert sites(Conv1D(5, 7).bfloat16()) == ([], [])


def test_slow_dtypes() -> None:
    assert [is_slow_in_torch(dtype) for dtype in (*HALVES, torch.float32)] == [True, True, False]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@torch.no_grad()
def test_a_patched_model_rounds_no_more_than_stock(dtype: torch.dtype, calls: list[int]) -> None:
    model, stock = build("gpt2", dtype=dtype), build("gpt2", dtype=dtype)
    plan = hf_accel.plan(model, weights=None)
    assert ("8 float Conv1Ds", "torch, in float32") in [(line.what, line.choice) for line in plan.lines]
    assert not any("Conv1D" in line.what for line in hf_accel.plan(model, weights="int8").lines)
    hf_accel.patch(model, weights=None)
    calls.clear()  # of the trials
    ids = torch.arange(1, 12)[None]
    got, rounded, exact = (m(ids).logits.double() for m in (model, stock, build("gpt2").double()))
    assert calls == [11] * 8
    assert (got - exact).norm() < 2 * (rounded - exact).norm()
    hf_accel.unpatch(model)
    assert torch.equal(model(ids).logits, stock(ids).logits)
    assert type(model.transformer.h[0].attn.c_attn) is Conv1D
