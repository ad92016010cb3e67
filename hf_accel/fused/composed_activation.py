"""Activation functions of modules as one native call, where torch needs several operators or rounds by the place.

torch computes numbers that fill vectors in one way and the last ones of a tensor, or of a thread's share of it, in
another. So the bits of a token's SiLU depend on the other tokens of a pass, and on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..kernels.cpu.library import FLOATS, native
from ..kernels.cpu.row_kernels import activate
from ..models import answer_once
from ..recognition.trial import (
    PLAIN_ACTIVATIONS,
    RandomNumbers,
    Tolerance,
    activation_name,
    agree,
    settings_of_activation,
)
from ..recognition.unchanged import is_known_class
from ..undo.journal import Mixin
from ..undo.state import FUSED


@dataclass(frozen=True)
class ActivationForm:
    """The name of a function in kernels/cpu, and the dtype in which a module was found to compute it."""

    name: str
    dtype: torch.dtype


class _Counted(TorchFunctionMode):
    """Counts the operators of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **kwargs or {})


def composed_activation(module: nn.Module, dtype: torch.dtype) -> ActivationForm | None:
    """Return the form of an activation that a native call is better for; None for any other module.

    That is one that torch computes by several operators, or whose numbers it rounds by their place: another single
    operator is as fast as ours. In bfloat16 and float16 torch rounds after each operator, and ours once, so that most
    are left alone.
    """
    kind = settings_of_activation(module)
    return (
        None if kind is None or dtype not in FLOATS else answer_once(_composed_activation, module, dtype, equal=kind)
    )


def _composed_activation(module: nn.Module, dtype: torch.dtype) -> ActivationForm | None:
    name = activation_name(module, PLAIN_ACTIVATIONS) if is_known_class(type(module)) else None
    if name is None:
        return None
    x = (RandomNumbers()(512) * 3).to(dtype)
    with torch.no_grad(), _Counted() as counted:
        module(x)
    placed = rounds_by_place(module, dtype)
    tolerance = Tolerance(roundings=4, absolute=1e-6 if placed or dtype is torch.float32 else 0.0)
    same = (placed or counted.calls > 1) and agree(lambda: module(x), lambda: activate(x, name), tolerance)
    return ActivationForm(name, dtype) if same else None


@torch.no_grad()
def rounds_by_place(activation: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
    """Return whether the bits of an activation's numbers depend on what else is in their tensor."""
    x = (RandomNumbers()(9, 45) * 3).to(dtype)
    with torch.autocast("cpu", enabled=False):  # a user's own
        return not torch.equal(activation(x), torch.cat([activation(row[None]) for row in x]))


class NativeActivation(Mixin):
    """A mixin for an activation function: one native call instead of several operators."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """x [...] -> [...]."""
        if len(args) == 1 and not kwargs and native(args[0]):
            x: Tensor = args[0]
            form: ActivationForm = self.__dict__[FUSED]
            if x.dtype is form.dtype and x.ndim and x.numel():
                return activate(x, form.name)
        stock: Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        return stock
