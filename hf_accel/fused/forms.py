"""Norms, rotations and gates: the calls that compute them, and the form in which a module's own code computes them.

The native library computes on the CPU, Triton on an NVIDIA GPU. The form is read in the module's code, or found by
trying ours on random input. A form that computes the same in one dtype need not do so in another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import cpu, triton
from ..kernels.cpu import library, row_kernels
from ..kernels.layouts import KV
from ..recognition.source import gated_code
from ..recognition.trial import RandomNumbers, Tolerance, agree, difference
from ..recognition.unchanged import is_unobserved
from ..tensors import PLAIN, is_plain_tensor, is_recorded
from .projections import ProjectionCall

Form = TypeVar("Form")

# -- operators -----------------------------------------------------------------------------------------


def refusal(device_type: str) -> str | None:
    """Return why neither library computes on tensors of this kind of device, as a clause; None if one does."""
    if device_type != "cpu":
        return triton.refusal(device_type)
    return cpu.refusal() if triton.refusal("cpu") is not None else None


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
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, round_each: bool
) -> tuple[Tensor, Tensor]:
    """Compute rope of kernels/cpu; all tensors are on one device. cos, sin: [B or 1, T, D]."""
    if by_library(q):
        return row_kernels.rope(q, k, cos, sin, interleaved=interleaved, round_each=round_each)
    from ..kernels.triton import layer_parts

    each = row_kernels.rounds_each(q.dtype, cos.dtype, round_each=round_each)
    return layer_parts.rope(q, k, cos, sin, interleaved=interleaved, round_each=each)


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


# -- norms ---------------------------------------------------------------------------------------------

# The inputs that are tried: their magnitude (eps counts at the smallest), shape, and whether the module is training.
TRIALS = ((1e-3, (4,), False), (1.0, (2, 2), False), (300.0, (2, 1, 2), False), (1.0, (4,), True))


@dataclass(frozen=True)
class NormForm:
    """x / sqrt(mean(x^2) + eps) * (offset + weight); round_first: rounded to x's dtype before the product."""

    eps: float
    offset: float
    round_first: bool


def norm_form(module: nn.Module, kind: type | None = None, *, dtype: torch.dtype | None = None) -> NormForm | None:
    """Find how a module normalizes inputs of `dtype` (its weight's by default), by trying each form on random input.

    kind: the class whose forward it is. None if it is no RMSNorm, and holds anything besides a weight and an eps.
    """
    weight = module._parameters.get("weight")
    eps = vars(module).get("variance_epsilon") or vars(module).get("eps")
    if len(list(module.parameters())) != 1 or module._modules or module._buffers:
        return None
    if weight is None or weight.ndim != 1 or not is_plain_tensor(weight) or not isinstance(eps, float):
        return None
    dtype = dtype or weight.dtype
    if weight.dtype not in library.FLOATS or dtype not in library.FLOATS or refusal(weight.device.type) is not None:
        return None
    forms = [NormForm(eps, offset, first) for offset, first in product((0.0, 1.0), (True, False))]
    return _nearest(forms, lambda form: _norm_difference(copy.copy(module), kind or type(module), form, dtype))


def _nearest(forms: list[Form], different: Callable[[Form], float]) -> Form | None:
    """Return the form that differs least; None if all differ by more than a rounding."""
    differences = [different(form) for form in forms]
    least = min(differences)
    return None if least == math.inf else forms[differences.index(least)]


def _norm_difference(module: Any, kind: Any, form: NormForm, dtype: torch.dtype) -> float:
    """The `difference` over all TRIALS.

    torch's own sums differ in the last bit by how memory is aligned, so that equality cannot be required.
    """
    numbers, weight, different = RandomNumbers(), module._parameters["weight"], 0.0
    for magnitude, shape, module.training in TRIALS:
        x = (numbers(*shape, weight.shape[0]) * magnitude).to(weight.device, dtype)
        roundings = 2 if by_library(x) else 4  # another device's square root rounds in its own way
        different += difference(
            lambda x=x: kind.forward(module, x),  # type: ignore[misc]
            lambda x=x: rms_norm(x, weight, form.eps, offset=form.offset, round_first=form.round_first),  # type: ignore[misc]
            Tolerance(roundings),
        )
    return different


# -- rotations -----------------------------------------------------------------------------------------

ROTATION = "apply_rotary_pos_emb"
Rotation = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RotaryForm:
    """interleaved: pairs of neighbours, else of the halves. round_each: both products are rounded."""

    interleaved: bool
    round_each: bool


def rotary_form(module: nn.Module, dtype: torch.dtype, device_type: str = "cpu") -> RotaryForm | None:
    """Find how the module's forward rotates q and k, by trying each form on random input; None if it does not."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names:
        return None
    original = forward.__globals__.get(ROTATION)
    return None if original is None else form_of_rotation(original, dtype, dtype, device_type)


def with_rotation(forward: Any, rotate: Callable[..., Any]) -> FunctionType:
    """Copy a forward, so that it finds another function under the name of its rotation."""
    copy = FunctionType(
        forward.__code__, forward.__globals__ | {ROTATION: rotate}, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@lru_cache(maxsize=256)
def form_of_rotation(
    original: Rotation, dtype: torch.dtype, table_dtype: torch.dtype, device_type: str = "cpu"
) -> RotaryForm | None:
    """Return how a function rotates q and k of `dtype` by tables of `table_dtype`; None if in no way that we know."""
    if dtype not in library.FLOATS or table_dtype not in library.FLOATS or refusal(device_type) is not None:
        return None
    forms = [RotaryForm(interleaved, each) for interleaved, each in product((False, True), (True, False))]
    return _nearest(forms, lambda form: _rotary_difference(original, form, (dtype, table_dtype), device_type))


def _rotary_difference(
    original: Rotation, form: RotaryForm, dtypes: tuple[torch.dtype, torch.dtype], device_type: str
) -> float:
    """The `difference`; the native library's bits may not differ at all. dtypes: of q and k, and of the tables."""
    numbers = RandomNumbers()
    q, k = (numbers(2, heads, 5, 16, dtype=dtypes[0], device=device_type) for heads in (6, 2))
    angle = numbers(2, 5, 8)
    angle = angle.repeat_interleave(2, dim=-1) if form.interleaved else torch.cat((angle, angle), dim=-1)
    cos, sin = ((angle * 3).cos().to(device_type, dtypes[1]), (angle * 3).sin().to(device_type, dtypes[1]))
    roundings = 0 if by_library(q) else 4 * torch.finfo(dtypes[0]).eps
    return difference(
        lambda: original(q, k, cos, sin),
        lambda: rope(q, k, cos, sin, interleaved=form.interleaved, round_each=form.round_each),
        Tolerance(relative=roundings, absolute=roundings),
    )


# -- gated MLPs ----------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
# Attributes of these modules are settings, whose effect a trial shows. Other modules must have no attributes.
KNOWN_MODULES = ("torch.nn.modules.activation", "transformers.activations")


@dataclass
class GatedNames:
    """The names of an MLP's parts. activation: None if the code names a torch function; else what the name held."""

    gate: str
    up: str
    down: str
    activation: tuple[str, Any] | None
    call: ProjectionCall


def gated_names(module: nn.Module, float_rows: int) -> GatedNames | None:
    """Return the parts of a module whose code is down(act(gate(x)) * up(x)) and nothing else; None for any other."""
    code = gated_code(type(module).forward)
    if code is None:
        return None
    if not all(isinstance(getattr(module, name, None), nn.Linear) for name in (code.gate, code.up, code.down)):
        return None
    named = isinstance(code.activation, str)
    activation = getattr(module, code.activation, None) if isinstance(code.activation, str) else code.activation
    epilogue = _epilogue(activation)
    if epilogue is None:
        return None
    held = (str(code.activation), activation) if named else None
    return GatedNames(code.gate, code.up, code.down, held, ProjectionCall(float_rows, epilogue))


def _epilogue(activation: Any) -> str | None:
    """Return the name of our activation that a callable computes, found by calling it."""
    if not callable(activation) or (isinstance(activation, nn.Module) and not _is_stateless(activation)):
        return None
    large = torch.logspace(1, 4, 7, device="cpu")
    x = torch.cat([torch.linspace(-12, 12, 97, device="cpu"), large, -large])
    matches = (
        name for name, ours in ACTIVATIONS.items()
        if agree(lambda: activation(x.clone()), lambda ours=ours: ours(x), Tolerance(absolute=1e-6))  # type: ignore[misc]
    )  # fmt: skip
    return next(matches, None)


def _is_stateless(activation: nn.Module) -> bool:
    if activation._parameters or activation._buffers or activation._modules or not is_unobserved(activation):
        return False
    return type(activation).__module__ in KNOWN_MODULES or vars(activation).keys() == vars(nn.Module()).keys()
