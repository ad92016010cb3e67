"""Norms: the form in which code computes one, found by trying ours on random input, and a native forward for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.cpu import library
from ..recognition.source import without_renaming
from ..recognition.trial import RandomNumbers, Tolerance, difference, unwatched_twin
from ..tensors import is_plain_tensor
from ..undo.journal import Mixin, original_class
from ..undo.state import FUSED
from .modules import by_library, computes, nearest, refusal, rms_norm

# The inputs that are tried: their magnitude (eps counts at the smallest), shape, and whether the module is training.
TRIALS = ((1e-3, (4,), False), (1.0, (2, 2), False), (300.0, (2, 1, 2), False), (1.0, (4,), True))
CONSTANTS = (
    bool,
    int,
    float,
    str,
    tuple,
    torch.dtype,
    type(None),
)  # types of attributes that nobody can change inside


WITHOUT_WEIGHT = 24  # the numbers that a norm without a weight is tried with, which takes any number of them


@dataclass(frozen=True)
class NormForm:
    """x / sqrt(mean(x^2) + eps) * (offset + weight); round_first: rounded to x's dtype before the product.

    A norm that multiplies by nothing is computed with a weight of ones, see `weight_of`.
    """

    eps: float
    offset: float
    round_first: bool


def norm_form(module: nn.Module, dtype: torch.dtype | None = None, *, device_type: str = "cpu") -> NormForm | None:
    """Find how a module normalizes inputs of `dtype` (its weight's by default), by trying each form on random input.

    The forward is that of the class before patch(). None if it is no RMSNorm, or holds more than a weight and an eps.
    One without a weight is known if device_type is "cpu"; it may have buffers, if its code does not read them.
    Modules of the same code and settings have the same form: it is tried once for all of them.
    """
    weight = module._parameters.get("weight")
    eps = vars(module).get("variance_epsilon") or vars(module).get("eps")
    on_other_device = device_type != "cpu" and not module._parameters
    if module._modules or not isinstance(eps, float) or on_other_device:
        return None
    if not module._parameters:
        dtype = dtype or torch.float32
        weight_dtype, device, width = dtype, torch.device("cpu"), WITHOUT_WEIGHT
    elif (
        weight is None
        or len(module._parameters) != 1
        or module._buffers
        or weight.ndim != 1
        or not is_plain_tensor(weight)
    ):
        return None
    else:
        dtype = dtype or weight.dtype
        weight_dtype, device, width = weight.dtype, weight.device, len(weight)
    if weight_dtype not in library.FLOATS or dtype not in library.FLOATS or refusal(device.type) is not None:
        return None
    bare = unwatched_twin(module)
    vars(bare).update(_parameters={}, _buffers={})
    code = tuple(_code_and_settings(module))
    trial = _Trial(code, eps, dtype, weight_dtype, device, width, bare, weight is not None)
    try:
        return _known_form(trial)
    except TypeError:  # of a setting without a hash
        return _found_form(trial)


@dataclass(frozen=True)
class _Trial:
    """Everything that the outcome of a trial depends on. module: a copy of one, without its weight.

    multiplies: whether it has a weight.
    """

    code: tuple[object, ...]
    eps: float
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    width: int
    module: nn.Module = field(compare=False)
    multiplies: bool = True


def _code_and_settings(module: nn.Module) -> Iterator[object]:
    """Yield what the forward of a module's class reads by name, and the module's own attributes."""
    kind = original_class(module)
    code = getattr(without_renaming(kind.forward), "__code__", None)
    known = getattr(without_renaming(kind.forward), "__globals__", {})
    yield from (kind, kind.forward)
    for name in () if code is None else code.co_names:
        yield from (name, getattr(kind, name, None), known.get(name))
    for name, value in vars(module).items():
        if name not in _OF_MODULES:
            yield from (name, type(value), value if isinstance(value, CONSTANTS) else object())  # which nothing equals


_OF_MODULES = {*vars(nn.Module()), FUSED}


@lru_cache(maxsize=256)
def _known_form(trial: _Trial) -> NormForm | None:
    return _found_form(trial)


def _found_form(trial: _Trial) -> NormForm | None:
    if not trial.multiplies:
        only = NormForm(trial.eps, 0.0, round_first=False)
        weight = ones(trial.width, trial.dtype)
        return nearest([only], lambda form: _difference(trial.module, form, weight, trial.dtype))
    forms = [NormForm(trial.eps, offset, first) for offset, first in product((0.0, 1.0), (True, False))]
    # Not the module's own weight: with ones, or zeros, two forms give the same.
    weight = (1 + RandomNumbers()(trial.width) / 4).to(trial.device, trial.weight_dtype)
    tried = unwatched_twin(trial.module, _parameters={"weight": nn.Parameter(weight, requires_grad=False)})
    return nearest(forms, lambda form: _difference(tried, form, weight, trial.dtype))


def _difference(module: Any, form: NormForm, weight: Tensor, dtype: torch.dtype) -> float:
    """The `difference` over all TRIALS.

    torch's own sums differ in the last bit by how memory is aligned, so that equality cannot be required.
    """
    kind, numbers, different = original_class(module), RandomNumbers(), 0.0
    for magnitude, shape, module.training in TRIALS:
        x = (numbers(*shape, weight.shape[0]) * magnitude).to(weight.device, dtype)
        roundings = 2 if by_library(x) else 4  # another device's square root rounds in its own way
        different += difference(
            lambda x=x: kind.forward(module, x),  # type: ignore[misc]
            lambda x=x: rms_norm(x, weight, form.eps, offset=form.offset, round_first=form.round_first),  # type: ignore[misc]
            Tolerance(roundings),
        )
    return different


class NormForms:
    """The form of one norm for each dtype, since a form that fits in float32 need not fit in bfloat16.

    None: no form fits.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], NormForm | None] = {}
        self._pending: tuple[Tensor, int, Tensor] | None = None  # x, its version, and the norm of it

    def form(self, module: nn.Module, x: Tensor) -> NormForm | None:
        """Return the form of `module` for inputs like x [..., n]; it is found at the first call."""
        own = module.__dict__
        weight = own["_parameters"].get("weight")  # None where it is computed: prune, parametrize
        if weight is None and (own["_parameters"] or not x.is_cpu):
            return None
        if weight is not None and (x.shape[-1:] != weight.shape or weight.device != x.device):
            return None
        key = (
            x.dtype,
            None if weight is None else weight.dtype,
            x.device.type,
            own.get("variance_epsilon") or own.get("eps"),
            original_class(module).forward,
        )
        if key not in self._known:
            self._known[key] = norm_form(module, x.dtype)
        return self._known[key]

    def leave(self, x: Tensor, normed: Tensor) -> None:
        """Keep the norm of x, which was computed with x, until the module is called. torch counts the writes to x."""
        self._pending = (x, x._version, normed)

    def take(self, x: Tensor) -> Tensor | None:
        """Return the norm that was left for x; None if x is another tensor, or was written to since."""
        (source, version, normed), self._pending = self._pending or (None, 0, None), None
        return normed if source is x and version == x._version else None

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_pending": None}


@lru_cache(maxsize=64)
def ones(width: int, dtype: torch.dtype) -> Tensor:
    """Return ones [width] on the CPU, which nobody may write to."""
    with torch.inference_mode(False):
        return torch.ones(width, dtype=dtype, device="cpu")


def weight_of(module: nn.Module, width: int, dtype: torch.dtype) -> Tensor:
    """Return what a norm with a form multiplies by: its weight, or ones [width] of `dtype`."""
    weight = module._parameters.get("weight")
    return ones(width, dtype) if weight is None else weight


class NativeNorm(Mixin):
    """A mixin for an RMSNorm: one native call instead of six operators."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and computes(args[0]):
            own, x = self.__dict__, args[0]
            left = own[FUSED].take(x)
            if left is not None:
                return left
            form = own[FUSED].form(self, x)
            if form is not None:
                weight = weight_of(self, x.shape[-1], x.dtype)  # type: ignore[arg-type]
                return rms_norm(x, weight, form.eps, offset=form.offset, round_first=form.round_first)
        return super().forward(*args, **kwargs)  # type: ignore[misc]
