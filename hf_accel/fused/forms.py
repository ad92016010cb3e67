"""What a norm, a rotation or an MLP computes: read in its code, and found by trying our forms on random input.

A form that computes the same in one dtype need not do so in another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.cpu.library import FLOATS
from ..recognition.structure import gated_code
from ..tensors import is_plain_tensor
from .operators import by_library, refusal, rms_norm, rope
from .projections import ProjectionCall, is_unobserved

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
    """How a module normalizes inputs of `dtype` (its weight's by default), found by trying each form on random input.

    kind: the class whose forward it is. None if it is no RMSNorm, and holds anything besides a weight and an eps.
    """
    weight = module._parameters.get("weight")
    eps = vars(module).get("variance_epsilon") or vars(module).get("eps")
    if len(list(module.parameters())) != 1 or module._modules or module._buffers:
        return None
    if weight is None or weight.ndim != 1 or not is_plain_tensor(weight) or not isinstance(eps, float):
        return None
    dtype = dtype or weight.dtype
    if weight.dtype not in FLOATS or dtype not in FLOATS or refusal(weight.device.type) is not None:
        return None
    forms = [NormForm(eps, offset, first) for offset, first in product((0.0, 1.0), (True, False))]
    with torch.random.fork_rng(devices=[]):  # one with dropout in it would take of the user's random numbers
        differences = [_difference(copy.copy(module), kind or type(module), form, dtype) for form in forms]
    least = min(differences)
    return None if least == math.inf else forms[differences.index(least)]


@torch.no_grad()
def _difference(module: Any, kind: Any, form: NormForm, dtype: torch.dtype) -> float:
    """The share of numbers that differ from the module's own; infinite where one does by more than a rounding.

    torch's own sums differ in the last bit by how memory is aligned, so that equality cannot be asked for.
    """
    generator, weight = torch.Generator("cpu").manual_seed(0), module._parameters["weight"]
    different = 0.0
    for magnitude, shape, module.training in TRIALS:
        x = (torch.randn(*shape, weight.shape[0], generator=generator, device="cpu") * magnitude).to(
            weight.device, dtype
        )
        got = rms_norm(x, weight, form.eps, offset=form.offset, round_first=form.round_first)
        expected = kind.forward(module, x)
        if not isinstance(expected, Tensor) or got.dtype != expected.dtype or got.shape != expected.shape:
            return math.inf
        roundings = 2 if by_library(x) else 4  # another device's square root rounds in its own way
        if not torch.allclose(got, expected, rtol=roundings * torch.finfo(got.dtype).eps, atol=0):
            return math.inf
        different += float((got != expected).float().mean())
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
    """How the module's forward rotates q and k, found by trying each form on random input; None if not at all."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names:
        return None
    original = forward.__globals__.get(ROTATION)
    return None if original is None else form_of_rotation(original, dtype, dtype, device_type)


def with_rotation(forward: Any, rotate: Callable[..., Any]) -> FunctionType:
    """A copy of a forward that finds another function under the name of its rotation."""
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
    """How a function rotates q and k of `dtype` by tables of `table_dtype`; None if in no way that we know."""
    if dtype not in FLOATS or table_dtype not in FLOATS or refusal(device_type) is not None:
        return None
    forms = [RotaryForm(interleaved, each) for interleaved, each in product((False, True), (True, False))]
    differences = [_unlike(original, form, (dtype, table_dtype), device_type) for form in forms]
    least = min(differences)
    return None if least == math.inf else forms[differences.index(least)]


@torch.no_grad()
def _unlike(original: Rotation, form: RotaryForm, dtypes: tuple[torch.dtype, torch.dtype], device_type: str) -> float:
    """The share of numbers that differ from the function's own; infinite where one does by more than a rounding.

    The native library's may not differ at all. dtypes: of q and k, and of the tables.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, angle = (
        torch.randn(2, *shape, generator=generator, device="cpu") for shape in ((6, 5, 16), (2, 5, 16), (5, 8))
    )
    q, k = q.to(device_type, dtypes[0]), k.to(device_type, dtypes[0])
    angle = angle.repeat_interleave(2, dim=-1) if form.interleaved else torch.cat((angle, angle), dim=-1)
    cos, sin = ((angle * 3).cos().to(device_type, dtypes[1]), (angle * 3).sin().to(device_type, dtypes[1]))
    roundings = 0 if by_library(q) else 4 * torch.finfo(dtypes[0]).eps
    different = 0.0
    try:
        expected = original(q, k, cos, sin)
        got = rope(q, k, cos, sin, interleaved=form.interleaved, round_each=form.round_each)
        for a, b in zip(got, expected, strict=True):
            if a.dtype != b.dtype or not torch.allclose(a, b, rtol=roundings, atol=roundings):
                return math.inf
            different += float((a != b).float().mean())
    except Exception:  # another function of that name, with other arguments or results
        return math.inf
    return different


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
    """The parts of a module whose code is down(act(gate(x)) * up(x)) and nothing else; None for any other."""
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
    """Which of our activations a callable computes, found by calling it."""
    if not callable(activation) or (isinstance(activation, nn.Module) and not _is_stateless(activation)):
        return None
    large = torch.logspace(1, 4, 7, device="cpu")
    x = torch.cat([torch.linspace(-12, 12, 97, device="cpu"), large, -large])
    try:
        got = activation(x.clone())
    except Exception:  # a module that is not an activation fails in its own way
        return None
    if not isinstance(got, Tensor) or got.shape != x.shape or got.dtype != x.dtype:
        return None
    matches = (name for name, ours in ACTIVATIONS.items() if torch.allclose(ours(x), got, rtol=0, atol=1e-6))
    return next(matches, None)


def _is_stateless(activation: nn.Module) -> bool:
    if activation._parameters or activation._buffers or activation._modules or not is_unobserved(activation):
        return False
    return type(activation).__module__ in KNOWN_MODULES or vars(activation).keys() == vars(nn.Module()).keys()
