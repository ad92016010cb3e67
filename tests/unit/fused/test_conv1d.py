"""Conv1Ds whose weight [in, out] is read where it is: stock's numbers but for rounding, or stock."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import hf_accel
from hf_accel.fused.hf.sites import native_linears
from hf_accel.fused.projections import NativeConv1D, ProjectionCall
from hf_accel.hardware import UNLIMITED
from hf_accel.kernels import cpu as kernels
from hf_accel.undo.journal import mixed_class
from hf_accel.undo.state import FUSED
from tests.parity.families import build

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(inputs: int, outputs: int, dtype: torch.dtype, rows: int = UNLIMITED) -> Conv1D:
    """Random, with what a patch gives it."""
    made = Conv1D(outputs, inputs).to(dtype).requires_grad_(False)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    made.__class__ = mixed_class(NativeConv1D, Conv1D)
    vars(made)[FUSED] = ProjectionCall(rows)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (48, 144), (64, 64), (130, 67)])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (1, 40)], ids=str)
@torch.no_grad()
def test_products_are_summed_wide_and_rounded_once(
    dtype: torch.dtype, inputs: int, outputs: int, shape: tuple[int, ...]
) -> None:
    module, x = layer(inputs, outputs, dtype), torch.randn(*shape, inputs).to(dtype)
    got = module(x)
    exact = x.double() @ module.weight.double() + module.bias.double()
    assert (got.dtype, got.shape) == (dtype, exact.shape)
    size = x.double().abs() @ module.weight.double().abs() + module.bias.double().abs()
    error = (got.double() - exact).abs()
    assert bool((error <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5 * size + 1e-7).all())


@torch.no_grad()
def test_many_rows_go_to_torch() -> None:
    module = layer(64, 64, torch.float32, rows=4)
    for rows, is_native in ((4, True), (5, False)):
        x = torch.randn(rows, 64)
        native = layer(64, 64, torch.float32)
        native.load_state_dict(module.state_dict())
        assert torch.equal(module(x), native(x) if is_native else Conv1D.forward(module, x))


@torch.no_grad()
def test_what_is_not_known_is_stocks() -> None:
    x = torch.randn(3, 8).bfloat16()
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


@torch.no_grad()
def test_a_square_weight_may_be_replaced_by_its_transpose() -> None:
    module, x = layer(64, 64, torch.float32), torch.randn(3, 64)
    module(x)
    module.weight.data = module.weight.data.t()
    torch.testing.assert_close(module(x), Conv1D.forward(module, x), atol=1e-4, rtol=1e-4)


def test_gradients_are_stocks() -> None:
    module, x = layer(8, 4, torch.bfloat16).requires_grad_(True), torch.randn(3, 8).bfloat16()
    module(x).sum().backward()
    expected = x.float().sum(0)[:, None].expand(8, 4)
    torch.testing.assert_close(module.weight.grad.float(), expected, atol=0.02, rtol=0.02)


@torch.no_grad()
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_has_a_call_of_its_own(clone: Any) -> None:
    module, x = layer(8, 4, torch.bfloat16), torch.randn(3, 8).bfloat16()
    before = module(x)
    other = clone(module)
    module.weight.zero_()
    assert torch.equal(other(x), before)


class ScaledConv1D(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


ScaledConv1D.__name__ = "Conv1D"


def test_only_known_code_is_taken() -> None:
    (site,) = native_linears(nn.ModuleList([Conv1D(5, 7)]), 64, 32)
    assert (site.mixin, site.state.float_rows) == (NativeConv1D, 32)
    weighted, hooked = Conv1D(5, 7), Conv1D(5, 7)
    weighted.weight = nn.Parameter(torch.randn(5, 7).t())
    hooked.forward = lambda x: x
    others = [ScaledConv1D(5, 7), nn.Conv1d(5, 7, 1), weighted, hooked, Conv1D(5, 7).double()]
    assert not [*native_linears(nn.ModuleList(others), 64, 32)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_a_patched_model_rounds_no_more_than_stock(dtype: torch.dtype) -> None:
    model, stock = build("gpt2", dtype=dtype), build("gpt2", dtype=dtype)
    lines = {(line.what, line.choice) for line in hf_accel.plan(model, weights=None).lines}
    assert ("2 decoder layers", "one native call each") in lines
    assert sum(int(what.split()[0]) for what, _ in lines if "float linear" in what) == 9  # in one line or in two
    hf_accel.patch(model, weights=None)
    ids = torch.arange(1, 12)[None]
    got, rounded, exact = (m(ids).logits.double() for m in (model, stock, build("gpt2").double()))
    assert (got - exact).norm() < 2 * (rounded - exact).norm() + 1e-9
    tokens = {"input_ids": ids, "max_new_tokens": 8, "do_sample": False}
    if dtype is torch.float32:
        assert torch.equal(model.generate(**tokens), stock.generate(**tokens))
    hf_accel.unpatch(model)
    assert torch.equal(model(ids).logits, stock(ids).logits)
    assert type(model.transformer.h[0].attn.c_attn) is Conv1D
