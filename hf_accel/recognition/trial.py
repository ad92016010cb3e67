"""Trials: does a module, or a function, give the same as ours on random input? Which activation does an MLP have?"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import answer_once
from ..undo.journal import original_class
from ..undo.running_code import OURS, is_known_code
from .code import gated_code
from .unchanged import HOOKS, PLAIN_TYPES, is_unobserved


class Tolerance(NamedTuple):
    """The allowed distance of a number from the expected one; its parts are added up.

    roundings: a share of that number, in roundings of its dtype. relative: a share of it. absolute: a constant.
    of_largest: a share of the largest number.
    """

    roundings: int = 0
    relative: float = 0.0
    absolute: float = 0.0
    of_largest: float = 0.0


EXACT = Tolerance()


class RandomNumbers:
    """Normal numbers that are the same in each trial, made on the CPU; the user's random numbers stay."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Tensor:
        """Draw a tensor of this shape."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float32, device="cpu").to(device, dtype)


def unwatched_twin(module: nn.Module, **parts: dict[str, Any]) -> Any:
    """Copy a module for a trial: without its hooks, and with dictionaries of its own, of which `parts` are changed.

    parts: entries of `_modules` or `_parameters`, by that name; the others are shared with the module. A module's own
    weights may be many, or not loaded yet, and its layers would call hooks that a user has registered on them.
    """
    twin = copy.copy(module)
    vars(twin).update({name: OrderedDict() for name in HOOKS})
    vars(twin).update({name: {**vars(twin)[name], **entries} for name, entries in parts.items()})
    return twin


@torch.no_grad()
def difference(theirs: Callable[[], Any], ours: Callable[[], Any], tolerance: Tolerance = EXACT) -> float:
    """Return the share of numbers in which ours differ from theirs, summed over the tensors that each returns.

    theirs, ours: return a tensor, or a tuple of tensors, when they are called. Infinite where a number differs by more
    than the tolerance, a dtype or a shape by anything, or one of both fails: what cannot be tried is not known. The
    user's random numbers stay as they are.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # the tried code may have dropout
            pairs = list(zip(_tensors(theirs()), _tensors(ours()), strict=True))
            return sum(_apart(expected, got, tolerance) for expected, got in pairs)
    except Exception:
        return math.inf


def agree(theirs: Callable[[], Any], ours: Callable[[], Any], tolerance: Tolerance = EXACT) -> bool:
    """Return whether the `difference` is finite."""
    return difference(theirs, ours, tolerance) < math.inf


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _apart(expected: Tensor, got: Tensor, tolerance: Tolerance) -> float:
    if expected.dtype is not got.dtype or expected.shape != got.shape:
        return math.inf
    first, second = got.double(), expected.double()
    relative = tolerance.relative + tolerance.roundings * torch.finfo(got.dtype).eps
    absolute = tolerance.absolute + (tolerance.of_largest and tolerance.of_largest * float(second.abs().max()))
    if not torch.allclose(first, second, rtol=relative, atol=absolute):
        return math.inf
    return float((first != second).float().mean())


def seems_rms_norm(module: nn.Module) -> bool:
    """Return whether a module is named as an RMSNorm, or as T5's norm, which has a weight alone and no mean, or is a
    norm without any weight.
    """
    name = type(module).__name__
    if name.endswith("RMSNorm"):
        return True
    own = vars(module)
    if name.endswith("Norm") and not own["_parameters"] and not own["_modules"] and type(own.get("eps")) is float:
        return True
    is_t5s = name.endswith("LayerNorm") and not isinstance(module, nn.LayerNorm)
    is_t5s = is_t5s and "variance_epsilon" in own and list(own["_parameters"]) == ["weight"]
    return is_t5s and not is_layer_norm(module)


NAMES_OF_EPS = ("eps", "variance_epsilon")
USUAL_EPS = 1e-5  # of torch's LayerNorm, which code also writes that has no name for it
NORM_SIZES = "normalized_shape"


class LayerNormForm(NamedTuple):
    """(x - mean) / sqrt(variance + eps) * (offset + weight) + bias, of which a module has the parameters that it has.

    A weight [heads, dim] has other factors for each head.
    """

    eps: float
    offset: float = 0.0


def layer_norm_form(module: nn.Module) -> LayerNormForm | None:
    """Return how a module normalizes, if it is torch's LayerNorm, or code of its own that a trial finds to compute
    one, as DeBERTa's, or Cohere's without a bias; None for any other.
    """
    own = vars(module)
    if type(module) is nn.LayerNorm:
        return LayerNormForm(own["eps"])
    parameters = own["_parameters"]
    if own["_modules"] or own["_buffers"] or not set(parameters) <= {"weight", "bias"}:
        return None
    if "LayerNorm" not in type(module).__name__ or ("bias" in parameters and "weight" not in parameters):
        return None
    if any(each is None or each.ndim not in (1, 2) or each.shape != parameters["weight"].shape
           for each in parameters.values()):  # fmt: skip
        return None
    settings = settings_of_norm(module)
    sizes = settings.pop(NORM_SIZES, None)
    if not isinstance(sizes, (tuple, type(None))) or not all(isinstance(v, PLAIN_TYPES) for v in settings.values()):
        return None
    if not parameters and sizes is None:  # nothing says how many numbers it takes
        return None
    ranks = tuple(each.ndim for each in parameters.values())
    equal = (original_class(module), *parameters, *ranks, *sorted(settings.items()))
    return answer_once(_found_layer_norm, module, equal=equal)


def is_layer_norm(module: nn.Module) -> bool:
    """Return whether a module computes a LayerNorm of which the form is known."""
    return layer_norm_form(module) is not None


def settings_of_norm(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module has besides those of all modules: a trial shows their effect."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


_OF_MODULES = vars(nn.Module()).keys()


def _found_layer_norm(module: nn.Module) -> LayerNormForm | None:
    """Return how the code of a module's class normalizes numbers in float32, with parameters of a trial."""
    kind, numbers, own = original_class(module), RandomNumbers(), vars(module)
    eps = next((own[name] for name in NAMES_OF_EPS if name in own), USUAL_EPS)
    if type(eps) is not float:
        return None
    size = 12
    by_head = any(each.ndim == 2 for each in own["_parameters"].values())
    shape = (2, size) if by_head else (size,)
    given = {name: nn.Parameter(numbers(*shape), requires_grad=False) for name in own["_parameters"]}
    twin = unwatched_twin(module, _parameters=given)
    if NORM_SIZES in own:
        vars(twin)[NORM_SIZES] = (size,)
    # eps counts at the smallest magnitude
    tried = [numbers(2, 3, *shape) * eps**0.5, numbers(3, *shape), numbers(2, 2, *shape) * 300 + 7]

    def ours(x: Tensor, offset: float) -> Tensor:
        normed = F.layer_norm(x, (size,), None, None, eps)
        normed = normed * (given["weight"] + offset) if "weight" in given else normed
        return normed + given["bias"] if "bias" in given else normed

    for offset in (0.0, 1.0) if given else (0.0,):
        if all(agree(lambda x=x: kind.forward(twin, x), lambda x=x: ours(x, offset), NEAR_NORM) for x in tried):  # type: ignore[misc]  # noqa: B023
            return LayerNormForm(eps, offset)
    return None


NEAR_NORM = Tolerance(of_largest=1e-5)

# -- gated MLPs ----------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
# Those of a product without a gate.
PLAIN_ACTIVATIONS = ACTIVATIONS | {
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "relu_squared": lambda x: F.relu(x).square(),
}
# Attributes of these modules are settings, whose effect a trial shows. Other modules must have no attributes.
PARTS_OF_MODULES = vars(nn.Module()).keys() - {"training"}  # which are empty, or say nothing of what is computed
INITIALIZED = "_is_hf_initialized"  # what transformers writes on a module whose weights it has made
KNOWN_MODULES = ("torch.nn.modules.activation", "transformers.activations")


@dataclass(frozen=True)
class GatedNames:
    """The names of a gated MLP's parts, and of the function in ACTIVATIONS that its activation computes.

    activation: None if the code names a torch function; else the name of an attribute, and what it held.
    """

    gate: str
    up: str
    down: str
    activation: tuple[str, Any] | None
    epilogue: str

    def are_of(self, forward: Any) -> bool:
        """Return whether a forward's code computes by these names."""
        code = gated_code(forward)
        if code is None or (code.gate, code.up, code.down) != (self.gate, self.up, self.down):
            return False
        if isinstance(code.activation, str):
            return self.activation is not None and self.activation[0] == code.activation
        return self.activation is None and activation_name(code.activation, ACTIVATIONS) == self.epilogue


def gated_names(module: nn.Module) -> GatedNames | None:
    """Return the parts of a module whose code is down(act(gate(x)) * up(x)) and nothing else; None for any other."""
    code = gated_code(type(module).forward)
    if code is None or not all(
        isinstance(getattr(module, n, None), nn.Linear) for n in (code.gate, code.up, code.down)
    ):
        return None
    named = isinstance(code.activation, str)
    activation = getattr(module, code.activation, None) if isinstance(code.activation, str) else code.activation
    epilogue = activation_name(activation, ACTIVATIONS)
    held = (str(code.activation), activation) if named else None
    return None if epilogue is None else GatedNames(code.gate, code.up, code.down, held, epilogue)


def activation_name(activation: Any, known: Mapping[str, Callable[[Tensor], Tensor]]) -> str | None:
    """Return the name in `known` of the function that a callable computes, found by calling it; None if in no such."""
    if not callable(activation) or (isinstance(activation, nn.Module) and not _is_stateless(activation)):
        return None
    return answer_once(_tried_name, activation, known, equal=settings_of_activation(activation))


def settings_of_activation(activation: Any) -> Hashable:
    """Return the class and the settings of a module without parameters, by which it computes; None for any other."""
    if not isinstance(activation, nn.Module) or not _is_stateless(activation):
        return None
    settings = ((name, value) for name, value in vars(activation).items() if name not in PARTS_OF_MODULES)
    return type(activation), *((n, type(v), v if isinstance(v, PLAIN_TYPES) else id(v)) for n, v in settings)


def _tried_name(activation: Any, known: Mapping[str, Callable[[Tensor], Tensor]]) -> str | None:
    large = torch.logspace(1, 4, 7, device="cpu")
    x = torch.cat([torch.linspace(-12, 12, 97, device="cpu"), large, -large])
    matches = (
        name for name, ours in known.items()
        if agree(lambda: activation(x.clone()), lambda ours=ours: ours(x), Tolerance(absolute=1e-6))  # type: ignore[misc]
    )  # fmt: skip
    return next(matches, None)


def name_of_function(function: Any) -> str | None:
    """Return the name of what a known package's function of one tensor computes; None if it is not in
    PLAIN_ACTIVATIONS.
    """
    if type(function) is not FunctionType or function.__code__.co_argcount != 1 or not is_known_code(function):
        return None
    return _name_of_function(function)


@lru_cache(maxsize=1024)
def _name_of_function(function: Callable[..., Any]) -> str | None:
    return activation_name(function, PLAIN_ACTIVATIONS)


def _is_stateless(activation: nn.Module) -> bool:
    if activation._parameters or activation._buffers or activation._modules or not is_unobserved(activation):
        return False
    settings = [vars(activation)[name] for name in vars(activation).keys() - {*vars(nn.Module()), INITIALIZED}]
    return type(activation).__module__ in KNOWN_MODULES or all(
        type(each).__module__.partition(".")[0] == OURS for each in settings
    )
