"""down(act(gate(x)) * up(x)): gate, up and the activation in one native call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..instance import Mixin
from .products import Products, is_plain, native
from .structure import own_names, siblings

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass
class GatedNames:
    """The names of an MLP's parts."""

    gate: str
    up: str
    down: str
    products: Products


def gated_names(module: nn.Module, float_rows: int) -> GatedNames | None:
    """The parts of a module whose code is down(act(gate(x)) * up(x)) and nothing else; None for any other."""
    forward = type(module).forward
    names, pairs = own_names(forward), siblings(forward)
    if names is None or len(pairs) != 1 or len(pairs[0]) != 2:
        return None
    gate, up = pairs[0]
    rest = names - {gate, up}
    down = next((n for n in rest if isinstance(getattr(module, n, None), nn.Linear)), None)
    activation = next((n for n in rest if n != down), None)
    if len(rest) != 2 or down is None or activation is None:
        return None
    if not all(isinstance(getattr(module, name, None), nn.Linear) for name in (gate, up)):
        return None
    epilogue = _epilogue(getattr(module, activation))
    return None if epilogue is None else GatedNames(gate, up, down, Products(float_rows, epilogue))


def _epilogue(activation: object) -> str | None:
    """Which of our activations a callable computes, found by calling it."""
    if not callable(activation) or (isinstance(activation, nn.Module) and list(activation.parameters())):
        return None
    x = torch.linspace(-12, 12, 97)
    try:
        got = activation(x)
    except Exception:  # a module that is not an activation fails in its own way
        return None
    matches = (name for name, ours in ACTIVATIONS.items() if torch.allclose(ours(x), got, rtol=0, atol=1e-6))
    return next(matches, None)


class GatedMLP(Mixin):
    """Mixed into such a module; adapters or hooks on the gate or up projection bring the original forward back."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., in]."""
        parts: GatedNames = self.__dict__["_hf_accel_fused"]
        modules: dict[str, nn.Module] = self.__dict__["_modules"]
        gate, up = modules[parts.gate], modules[parts.up]
        if native(x) and is_plain(gate) and is_plain(up):
            call = parts.products.call((gate, up), x)
            if call is not None:
                hidden = call(x.reshape(-1, x.shape[-1]))
                result: Tensor = modules[parts.down](hidden.view(*x.shape[:-1], -1))
                return result
        stock: Tensor = super().forward(x)  # type: ignore[misc]
        return stock
