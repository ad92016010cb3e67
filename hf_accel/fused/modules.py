"""Norms, rotations and gates: the calls that compute them, the form in which code computes them, and native forwards.

The native library computes on the CPU, Triton on an NVIDIA GPU. The form is read in the module's code, or found by
trying ours on random input. A form that computes the same in one dtype need not do so in another. patch() gives the
modules a forward with one native call, which falls back to the original forward where that does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..kernels import cpu, triton
from ..kernels.cpu import library, row_kernels
from ..kernels.cpu.library import native
from ..kernels.layouts import KV
from ..recognition.code import PARTING_ROTATION, ROTATION, with_functions
from ..recognition.rotations import Rotation
from ..recognition.source import without_renaming
from ..recognition.trial import ACTIVATIONS, GatedNames, RandomNumbers, Tolerance, difference, gated_names
from ..recognition.unchanged import is_others_class, is_unobserved
from ..tensors import PLAIN, is_recorded
from ..undo.journal import Mixin, original_class
from ..undo.state import FUSED
from .projections import ProjectionCall, is_bare_linear

Form = TypeVar("Form")

# -- operators -----------------------------------------------------------------------------------------


def refusal(device_type: str) -> str | None:
    """Return why neither library computes on tensors of this kind of device, as a clause; None if one does."""
    if device_type != "cpu":
        return triton.refusal(device_type)
    native = cpu.refusal()
    return native if native is None or triton.refusal("cpu") is not None else None


def computes(x: object) -> bool:
    """Return whether one call may replace torch's operators on x."""
    if library.native(x):
        return True
    return (
        not torch.is_grad_enabled()
        and type(x) in PLAIN
        and x.is_cuda  # type: ignore[attr-defined]
        and x.dtype in library.FLOATS  # type: ignore[attr-defined]
        and not is_recorded()
        and not torch.is_autocast_enabled("cuda")
        and triton.refusal("cuda") is None
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float, round_first: bool) -> Tensor:
    """Compute rms_norm of kernels/cpu; x and weight are on one device."""
    if by_library(x):
        return row_kernels.rms_norm(x, weight, eps, offset=offset, round_first=round_first)
    from ..kernels.triton import layer_parts

    return layer_parts.rms_norm(x, weight, eps, offset=offset, round_first=round_first)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: int, round_each: bool
) -> tuple[Tensor, Tensor]:
    """Compute rope of kernels/cpu; all tensors are on one device. cos, sin: [B or 1, T, D]."""
    if by_library(q):
        return row_kernels.rope(q, k, cos, sin, interleaved=interleaved, round_each=round_each)
    from ..kernels.triton import layer_parts

    each = row_kernels.rounds_each(q.dtype, cos.dtype, round_each=round_each)
    return layer_parts.rope(q, k, cos, sin, interleaved=bool(interleaved), round_each=each)


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, *, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    """Compute x + y and its `rms_norm`, by Triton in one launch, with the bits of one after the other."""
    from ..kernels.triton import layer_parts

    return layer_parts.add_rms_norm(x, y, weight, eps, offset=offset, round_first=round_first)


def rope_and_write(
    heads: tuple[Tensor, Tensor, Tensor], tables: tuple[Tensor, Tensor], pages: KV, slots: Tensor, *,
    interleaved: bool, round_each: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `rope` of q and k, and write K and V, by Triton in one launch. heads: q, k and v, [B, H, T, D]."""
    from ..kernels.triton import kv_write

    each = row_kernels.rounds_each(heads[0].dtype, tables[0].dtype, round_each=round_each)
    return kv_write.rope_and_write(heads, tables, pages, slots, interleaved=interleaved, round_each=each)


def gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """Compute activation(gate) * up, of one shape and dtype, by Triton; the library does it while it multiplies."""
    from ..kernels.triton import layer_parts

    return layer_parts.gated(gate, up, activation=activation)


def by_library(x: Tensor) -> bool:
    """Return whether the native library computes on x; else Triton does."""
    return x.is_cpu and cpu.refusal() is None


def has_library(device_type: str) -> bool:
    """Return whether the native library computes on this kind of device."""
    return device_type == "cpu" and cpu.refusal() is None


def nearest(forms: list[Form], different: Callable[[Form], float]) -> Form | None:
    """Return the form that differs least; None if all differ by more than a rounding."""
    differences = [different(form) for form in forms]
    least = min(differences)
    return None if least == math.inf else forms[differences.index(least)]


# -- rotations -----------------------------------------------------------------------------------------

HALF_TABLES = 4  # the kernels' number for pairs of the halves with tables of half as many numbers as a head


@dataclass(frozen=True)
class RotaryForm:
    """interleaved: pairs of neighbours, else of the halves; 2 if the numbers of the pairs stand in the first half of a
    table; 3 if they stand there, and the rotated pairs are of the halves. round_each: both products are rounded.
    """

    interleaved: int
    round_each: bool


def rotary_form(module: nn.Module, dtype: torch.dtype, device_type: str = "cpu") -> RotaryForm | None:
    """Find how the module's forward rotates q and k, by trying each form on random input; None if it does not."""
    forward = without_renaming(type(module).forward)
    if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names:
        return None
    original = forward.__globals__.get(ROTATION)
    return None if original is None else form_of_rotation(original, dtype, dtype, device_type)


@lru_cache(maxsize=256)
def form_of_rotation(
    original: Rotation, dtype: torch.dtype, table_dtype: torch.dtype, device_type: str = "cpu"
) -> RotaryForm | None:
    """Return how a function rotates q and k of `dtype` by tables of `table_dtype`; None if in no way that we know."""
    if dtype not in library.FLOATS or table_dtype not in library.FLOATS or refusal(device_type) is not None:
        return None
    pairs = (False, True, 2, 3) if has_library(device_type) else (False, True)
    forms = [RotaryForm(interleaved, each) for interleaved, each in product(pairs, (True, False))]
    return nearest(forms, lambda form: _rotary_difference(original, form, (dtype, table_dtype), device_type))


def _rotary_difference(
    original: Rotation, form: RotaryForm, dtypes: tuple[torch.dtype, torch.dtype], device_type: str
) -> float:
    """The `difference`; the native library's bits may not differ at all. dtypes: of q and k, and of the tables."""
    numbers = RandomNumbers()
    q, k = (numbers(2, heads, 5, 16, dtype=dtypes[0], device=device_type) for heads in (6, 2))
    angle = numbers(2, 5, 8)
    angle = angle.repeat_interleave(2, dim=-1) if form.interleaved == 1 else torch.cat((angle, angle), dim=-1)
    cos, sin = ((angle * 3).cos().to(device_type, dtypes[1]), (angle * 3).sin().to(device_type, dtypes[1]))
    roundings = 0 if by_library(q) else 4 * torch.finfo(dtypes[0]).eps
    return difference(
        lambda: original(q, k, cos, sin),
        lambda: rope(q, k, cos, sin, interleaved=form.interleaved, round_each=form.round_each),
        Tolerance(relative=roundings, absolute=roundings),
    )


# -- rotations -----------------------------------------------------------------------------------------


class NativeRotary(Mixin):
    """A mixin for an attention module: its rotation is one native call.

    The original forward runs unchanged, except for the name `apply_rotary_pos_emb`, which it finds in globals of its
    own: a copy of its function with our rotation under that name. Neither the class nor its module is touched.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # a compiler could not follow into a function that was made here
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return _rewritten(original_class(self))(self, *args, **kwargs)


@lru_cache(maxsize=256)
def _rewritten(original: type) -> FunctionType:
    """Return the class's forward with our rotation, which calls the original one where ours does not apply."""
    forward: Any = original.forward  # type: ignore[attr-defined]
    own = without_renaming(forward)
    names = [name for name in (ROTATION, PARTING_ROTATION) if name in own.__code__.co_names]
    return with_functions(forward, {name: _native_rotation(own.__globals__[name]) for name in names})


def _native_rotation(stock: Rotation) -> Rotation:

    def rotate(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and _is_usual(*args):
            q, k, cos, sin = args
            # A form that rounds as stock does in one dtype need not in another, which a patched model can be given.
            form = form_of_rotation(stock, q.dtype, cos.dtype, q.device.type)
            if form is not None:
                return rope(q, k, cos, sin, interleaved=form.interleaved, round_each=form.round_each)
        return stock(*args, **kwargs)

    return rotate


def _is_usual(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether these are what the form was tried on: whole heads, and a row of the tables for each token."""
    if not (computes(q) and type(k) in PLAIN and type(cos) in PLAIN and type(sin) in PLAIN):
        return False
    if not (k.device == cos.device == sin.device == q.device and q.ndim == k.ndim == 4 and cos.ndim == 3):
        return False
    batch, _, tokens, size = q.shape
    return (
        q.dtype is k.dtype
        and cos.dtype is sin.dtype
        and k.shape[0] == batch
        and k.shape[2:] == q.shape[2:]
        and cos.shape == sin.shape
        and cos.shape[0] in (1, batch)
        and cos.shape[1:] == (tokens, size)
        and q.stride(-1) == k.stride(-1) == 1
        and q.numel() > 0
    )


# -- gated MLPs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GatedCall(GatedNames):
    """The parts of a gated MLP, and the call for gate, up and the activation."""

    call: ProjectionCall

    @staticmethod
    def of(module: nn.Module, float_rows: int) -> GatedCall | None:
        """Return the state of a gated MLP that is to get a native forward; None for any other module."""
        names = gated_names(module)
        return None if names is None else GatedCall(**vars(names), call=ProjectionCall(float_rows, names.epilogue))


class NativeGatedMLP(Mixin):
    """A mixin for an MLP down(act(gate(x)) * up(x)): gate, up and the activation are one native call.

    Adapters or hooks on its parts bring the original forward back.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """x [..., in] -> [..., in]."""
        if len(args) == 1 and not kwargs and native(args[0]):
            own, x = self.__dict__, args[0]
            parts: GatedCall = own[FUSED]
            modules: dict[str, nn.Module] = own["_modules"]
            gate, up = modules[parts.gate], modules[parts.up]
            if is_bare_linear(gate) and is_bare_linear(up) and _is_held(parts.activation, own):
                call = parts.call.ready((gate, up), x)
                if call is not None:
                    hidden = call(x.reshape(-1, x.shape[-1]))
                    return modules[parts.down](hidden.view(*x.shape[:-1], -1))
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class FusedGate(Mixin):
    """A mixin for an MLP down(act(gate(x)) * up(x)): the activation and the product are one call.

    For GPUs, where a linear layer is a kernel of its own anyway: all three are called.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """x [..., in] -> [..., in]."""
        if len(args) == 1 and not kwargs and computes(args[0]):
            own = self.__dict__
            parts: GatedCall = own[FUSED]
            if _is_held(parts.activation, own):
                modules: dict[str, nn.Module] = own["_modules"]
                gate, up, name = modules[parts.gate](args[0]), modules[parts.up](args[0]), parts.epilogue
                return modules[parts.down](gate_and_multiply(gate, up, name))
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def gate_and_multiply(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute activation(gate) * up, in one call if it takes these tensors. activation: a name of ACTIVATIONS."""
    if gate.dtype is up.dtype and gate.shape == up.shape and computes(gate) and type(up) in PLAIN:
        return gated(gate, up, activation=activation)
    return ACTIVATIONS[activation](gate) * up


def _is_held(activation: tuple[str, Any] | None, own: dict[str, Any]) -> bool:
    """Return whether the activation is unchanged since it was tried, and has no hooks."""
    if activation is None:
        return True
    name, tried = activation
    if isinstance(tried, nn.Module):
        return own["_modules"].get(name) is tried and is_unobserved(tried) and not is_others_class(type(tried))
    return own.get(name) is tried
