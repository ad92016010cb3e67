"""Modules that look like what the native calls know and are not, or stop being it: stock's result."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hf_accel.fused.hf.sites import ACTIVATION, fused_sites, native_linears
from hf_accel.fused.norms import NormForms
from hf_accel.fused.projections import NativeLinear
from hf_accel.fused.site import FusedSite
from hf_accel.kernels import cpu as kernels
from hf_accel.undo.journal import mixed_class
from hf_accel.undo.state import FUSED

from .models import GatedMLP, GemmaRMSNorm, LlamaRMSNorm, Rotating, apply_rotary_pos_emb, rotate_half

pytestmark = pytest.mark.skipif(kernels.refusal() is not None, reason=str(kernels.refusal()))


class FunctionMLP(nn.Module):
    """The activation is a function that the code names, as in LFM2."""

    def __init__(self, size: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(size, hidden, bias=False), nn.Linear(size, hidden, bias=False)
        self.w2 = nn.Linear(hidden, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Shifting(nn.Module):
    """SiLU until somebody sets what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) + self.shift


class ClippedSiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x).clamp(max=50)


class OptionalRMSNorm(LlamaRMSNorm):
    """May be asked for more than to normalize."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return super().forward(x) if residual is None else (super().forward(x + residual), x + residual)


class TrainingRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class FlatRMSNorm(LlamaRMSNorm):
    """Another norm for tokens without a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.ndim > 2 else super().forward(x) * 2


def native(module: nn.Module) -> nn.Module:
    """The module as patch() leaves it."""
    sites, _ = fused_sites(module, torch.float32, 64)
    for site in [*sites, *native_linears(module, 64, 64)]:
        site.module.__class__ = mixed_class(site.mixin, type(site.module))
        vars(site.module)[FUSED] = site.state
    return module


def sites(module: nn.Module, dtype: torch.dtype = torch.float32) -> list[FusedSite]:
    return fused_sites(module, dtype, 64)[0]


def reasons(module: nn.Module, dtype: torch.dtype = torch.float32) -> list[str]:
    return [dropped.reason for dropped in fused_sites(module, dtype, 64)[1]]


def test_an_activation_that_the_code_names() -> None:
    module = FunctionMLP()
    assert [site.kind.name for site in sites(module)] == ["mlp"]
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = module(x)
        torch.testing.assert_close(native(module)(x), expected)


@pytest.mark.parametrize("act", [Shifting(), ClippedSiLU(), nn.Sequential(nn.SiLU(), nn.Dropout(0.5))])
def test_an_activation_with_a_state_or_another_range_is_not_known(act: nn.Module) -> None:
    assert [site for site in sites(GatedMLP(8, 8, act)) if site.kind != ACTIVATION] == []


@pytest.mark.parametrize("build", [GatedMLP, FunctionMLP, LlamaRMSNorm, GemmaRMSNorm])
def test_float64_stays_stock(build: Callable[..., nn.Module]) -> None:
    module = (build(8) if build is not GatedMLP else GatedMLP(8, 8)).double()
    assert sites(module, torch.float64) == []
    if build in (LlamaRMSNorm, GemmaRMSNorm):
        assert reasons(module, torch.float64) == ["the native call does not compute in float64"]


@pytest.mark.parametrize("build", [lambda: GatedMLP(8, 8), lambda: LlamaRMSNorm(8), Rotating])
def test_a_forward_that_was_replaced_on_the_module(build: Callable[[], nn.Module]) -> None:
    module = build()
    module.forward = MethodType(lambda self, *args: torch.zeros(1), module)  # type: ignore[method-assign]
    assert sites(module) == []
    assert reasons(module) == ["its forward was replaced on the module itself"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_forward_that_is_replaced_on_a_part(name: str) -> None:
    module, x = native(GatedMLP(8, 16)), torch.randn(3, 8)
    layer = getattr(module, name)
    layer.forward = lambda x: F.linear(x, layer.weight) * 2
    torch.testing.assert_close(module(x), GatedMLP.forward(module, x))


@torch.no_grad()
def test_who_watches_the_activation_sees_it() -> None:
    module, x, seen = native(GatedMLP(8, 16, nn.SiLU())), torch.randn(3, 8), []
    module(x)
    handle = module.act_fn.register_forward_hook(lambda *args: seen.append("one"))
    module(x)
    handle.remove()
    handle = register_module_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    module(x)
    handle.remove()
    assert seen == ["one", "Linear", "SiLU", "Linear", "Linear", "GatedMLP"]
    module.act_fn = nn.ReLU()
    torch.testing.assert_close(module(x), GatedMLP.forward(module, x))


@torch.no_grad()
def test_a_function_that_is_replaced() -> None:
    module, x = native(GatedMLP(8, 16, F.silu)), torch.randn(3, 8)
    module(x)
    module.act_fn = torch.relu
    torch.testing.assert_close(module(x), GatedMLP.forward(module, x))


@torch.no_grad()
def test_keywords_and_more_arguments() -> None:
    mlp, norm, x = native(GatedMLP(8, 16)), native(OptionalRMSNorm(8)), torch.randn(3, 8)
    assert type(norm).__mro__[1].__name__ == "NativeNorm"
    torch.testing.assert_close(mlp(x=x), mlp(x))
    torch.testing.assert_close(norm(x=x), norm(x))
    for got, expected in zip(norm(x, x), OptionalRMSNorm.forward(norm, x, x), strict=True):
        torch.testing.assert_close(got, expected)


@torch.no_grad()
@pytest.mark.parametrize("build", [lambda: GatedMLP(8, 16), lambda: nn.Linear(8, 16), lambda: LlamaRMSNorm(8)])
def test_no_rows_and_wrong_sizes(build: Callable[[], nn.Module]) -> None:
    """Experts are called on no tokens at all; and a wrong size must not read beyond the weights."""
    module = native(build())
    stock = build()
    assert module(torch.empty(0, 8)).shape == stock(torch.empty(0, 8)).shape
    assert module(torch.empty(2, 0, 8)).shape == stock(torch.empty(2, 0, 8)).shape
    with pytest.raises(RuntimeError):
        module(torch.randn(3, 7))


@pytest.mark.parametrize("build", [TrainingRMSNorm, FlatRMSNorm])
def test_a_norm_that_does_more_at_times(build: Callable[[int], nn.Module]) -> None:
    norm, state = build(8), torch.get_rng_state()
    assert sites(norm) == []
    assert "differs" in reasons(norm)[0]
    assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
@pytest.mark.parametrize("build", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_a_norm_keeps_its_rounding_in_another_dtype(
    build: Callable[[int], nn.Module], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """In float32 one cannot tell when it rounds: .bfloat16() comes after patch(), or x comes in another dtype."""
    module = native(build(64))
    module(torch.randn(2, 64))
    x = torch.randn(50, 64).to(dtypes[0])
    module.to(dtypes[1])
    assert torch.equal(module(x), build.forward(module, x))  # type: ignore[attr-defined]


@torch.no_grad()
def test_a_norm_follows_its_eps() -> None:
    module, x = native(LlamaRMSNorm(64)), torch.randn(3, 64) * 1e-3
    module(x)
    module.variance_epsilon = 1e-1  # type: ignore[assignment]
    torch.testing.assert_close(module(x), LlamaRMSNorm.forward(module, x))


@torch.no_grad()
def test_a_rotation_keeps_its_rounding_in_another_dtype() -> None:
    module = native(Rotating())
    for dtype, table in [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]:
        q, k = torch.randn(1, 4, 9, 16).to(dtype), torch.randn(1, 2, 9, 16).to(dtype)
        tables = torch.randn(1, 9, 16).to(table), torch.randn(1, 9, 16).to(table)
        for got, expected in zip(module(q, k, tables=tables), apply_rotary_pos_emb(q, k, *tables), strict=True):
            assert torch.equal(got, expected) and got.dtype is expected.dtype


class Partial(Rotating):
    """Rotates the first half of each head."""

    def forward(self, q: Tensor, k: Tensor, *, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        size = tables[0].shape[-1]
        rotated = apply_rotary_pos_emb(q[..., :size], k[..., :size], *tables)
        return tuple(torch.cat([r, x[..., size:]], -1) for r, x in zip(rotated, (q, k), strict=True))  # type: ignore[return-value]


@torch.no_grad()
@pytest.mark.parametrize(("batch", "entries"), [(2, 9), (1, 9), (2, 1)])
@pytest.mark.parametrize(("build", "size"), [(Partial, 8), (Rotating, 16)])
def test_rotations_of_other_shapes(build: Any, size: int, batch: int, entries: int) -> None:
    """Part of a head, tables of one batch for all, one row for all tokens."""
    module, q, k = native(build()), torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    assert type(module) is not build
    tables = torch.randn(batch, entries, size), torch.randn(batch, entries, size)
    for got, expected in zip(module(q, k, tables=tables), build.forward(module, q, k, tables=tables), strict=True):
        torch.testing.assert_close(got, expected)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.torch.jit.trace")  # of another category in each release
def test_tensors_that_hold_no_numbers_and_recorders() -> None:
    """vmap, fake tensors, jit.trace and make_fx see torch's forms, of which a native call is none."""
    module, x = native(GatedMLP(8, 16)), torch.randn(3, 8)
    expected = module(x)
    torch.testing.assert_close(torch.func.vmap(module)(x), expected)
    torch.testing.assert_close(torch.jit.trace(module, torch.zeros(3, 8))(x), expected)
    traced = torch.fx.experimental.proxy_tensor.make_fx(module)(torch.zeros(3, 8))
    torch.testing.assert_close(traced(x), expected)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert module(mode.from_tensor(x)).shape == (3, 8)


def test_forms_are_tried_once() -> None:
    forms, norm = NormForms(), LlamaRMSNorm(8)
    assert forms.form(norm, torch.zeros(1, 8)) is forms.form(norm, torch.ones(2, 8))
    assert forms.form(norm, torch.zeros(1, 9)) is None


def test_what_half_rotation_is() -> None:
    assert rotate_half(torch.tensor([1.0, 2.0])).tolist() == [-2.0, 1.0]


@torch.no_grad()
def test_a_linear_with_a_subclass_for_a_weight_is_not_read() -> None:
    class Scaled(Tensor):
        pass

    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Scaled))
    assert list(native_linears(layer, 64, 64)) == []
    replaced = native(nn.Linear(4, 4, bias=False))
    replaced(torch.randn(1, 4))
    replaced.weight = layer.weight
    assert isinstance(replaced, NativeLinear)
    assert vars(replaced)[FUSED].ready((replaced,), torch.randn(1, 4)) is None
