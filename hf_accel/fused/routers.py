"""Modules that multiply by a matrix of their own, as the router of a mixture does: few rows are one native call.

The module's own code runs, in which the name F stands for torch.nn.functional with a `linear` of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..kernels.cpu.float_linear import FloatLinear
from ..kernels.cpu.library import FLOATS, native
from ..recognition.code import with_functions
from ..recognition.trial import unwatched_twin
from ..tensors import is_plain_tensor
from ..undo.journal import Mixin, original_class
from ..undo.state import FUSED

FUNCTIONAL = "F"  # what modelling files call torch.nn.functional


class RouterState:
    """The native product of one module. rows: the most that are multiplied natively.

    A copy or a pickle starts without what it holds: addresses, and a function.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.calls = 0  # products that were native
        self._forward: FunctionType | None = None
        self._held: tuple[Tensor, Tensor | None] | None = None
        self._call: FloatLinear | None = None
        self._weights: Mapping[str, Tensor | None] = {}

    def forward_of(self, module: nn.Module) -> FunctionType:
        """Return the forward of the module's class, with our product."""
        if self._forward is None:
            functions: dict[str, Any] = {FUNCTIONAL: _Functional(self)}
            self._forward = with_functions(original_class(module).forward, functions)
        self._weights = module._parameters
        return self._forward

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute F.linear, natively where the weight is the module's and the rows are few."""
        if not self._takes(x, weight, bias):
            return F.linear(x, weight, bias)
        if self._held is None or self._held[0] is not weight or self._held[1] is not bias:
            self._held, self._call = (weight, bias), FloatLinear([weight], [bias])
        assert self._call is not None
        if not self._call.has_shapes():
            self._held = None
            return F.linear(x, weight, bias)
        self.calls += 1
        return self._call(x)

    def _takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        if weight is not self._weights.get("weight") or not native(x) or x.ndim != 2 or not 0 < len(x) <= self.rows:
            return False
        tensors = [weight] if bias is None else [weight, bias]
        plain = all(is_plain_tensor(t) and t.is_cpu and t.is_contiguous() and t.dtype is x.dtype for t in tensors)
        return plain and weight.ndim == 2 and x.shape[1] == weight.shape[1] and weight.numel() > 0

    def __reduce__(self) -> Any:
        return RouterState, (self.rows,)


class _Functional:
    """Stands for torch.nn.functional."""

    def __init__(self, state: RouterState) -> None:
        self.linear = state.linear

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)


class NativeRouter(Mixin):
    """A mixin for a module whose code calls F.linear with a weight of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        if is_compiling():  # a compiler could not follow into a function that was made here
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.__dict__[FUSED].forward_of(self)(self, *args, **kwargs)


def seems_router(module: nn.Module) -> bool:
    """Return whether a module has a matrix called `weight`, and code that calls F.linear."""
    weight, forward = module._parameters.get("weight"), type(module).forward
    if isinstance(module, nn.Linear) or weight is None or weight.ndim != 2 or not isinstance(forward, FunctionType):
        return False
    calls = {FUNCTIONAL, "linear"} <= set(forward.__code__.co_names)
    return calls and forward.__globals__.get(FUNCTIONAL) is F and weight.dtype in FLOATS and weight.is_cpu


@torch.no_grad()
def multiplies_by_its_weight(module: nn.Module) -> bool:
    """Return whether the code of a module, on a row of zeros, multiplies by its weight as it is."""
    state, twin = RouterState(1), unwatched_twin(module)
    weight = module._parameters["weight"]
    assert weight is not None
    try:
        with torch.random.fork_rng(devices=[]):
            state.forward_of(twin)(twin, torch.zeros(1, weight.shape[1], dtype=weight.dtype, device="cpu"))
    except Exception:  # it takes something else than rows
        return False
    return state.calls == 1
