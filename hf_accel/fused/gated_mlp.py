"""down(act(gate(x)) * up(x)): gate, up and the activation in one native call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..instance import Mixin
from ..kernels.cpu.tensors import native
from ..state import FUSED
from .projections import ProjectionCall, is_plain, is_unobserved
from .structure import gated_code

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
# Their own attributes are settings, which are seen by trying. Others must have none.
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
    large = torch.logspace(1, 4, 7)
    x = torch.cat([torch.linspace(-12, 12, 97), large, -large])
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


class GatedMLP(Mixin):
    """Mixed into such a module; adapters or hooks on its parts bring the original forward back."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """x [..., in] -> [..., in]."""
        if len(args) == 1 and not kwargs and native(args[0]):
            own, x = self.__dict__, args[0]
            parts: GatedNames = own[FUSED]
            modules: dict[str, nn.Module] = own["_modules"]
            gate, up = modules[parts.gate], modules[parts.up]
            if is_plain(gate) and is_plain(up) and _is_held(parts.activation, own):
                call = parts.call.ready((gate, up), x)
                if call is not None:
                    hidden = call(x.reshape(-1, x.shape[-1]))
                    return modules[parts.down](hidden.view(*x.shape[:-1], -1))
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def _is_held(activation: tuple[str, Any] | None, own: dict[str, Any]) -> bool:
    """Whether the activation is what it was when it was tried, and nobody wants to see it called."""
    if activation is None:
        return True
    name, tried = activation
    if isinstance(tried, nn.Module):
        return own["_modules"].get(name) is tried and is_unobserved(tried)
    return own.get(name) is tried
