"""Gated RMSNorms, as recurrent layers have them behind their states: the form in which code computes one, found by
trying ours on random input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.cpu.gated_norm import GateForm, gated_norm
from ..kernels.cpu.library import FLOATS
from ..recognition.trial import RandomNumbers, Tolerance, agree, unwatched_twin
from ..undo.journal import original_class

GATE_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}  # of gates, by the names in modules


@dataclass(frozen=True)
class GatedNorm:
    """x / sqrt(mean(x^2) + eps) * weight in groups of a row, times silu(gate).

    groups: parts of a row that are normalized each by itself; 0 if there is no norm, and the gate alone. gate_first:
    whether x is multiplied by silu(gate) ahead of the norm. activation: of the gate, "silu" or "sigmoid".
    """

    eps: float
    groups: int
    gate_first: bool
    activation: str = "silu"

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
        """Compute rows [M, D] by our kernel, which rounds each row as a single one, as torch's may not.

        x: float32 or of the gate's dtype. gate: [M, D] of a dtype of FLOATS. weight: [D]; None if there is no norm.
        Returns [M, D] float32.
        """
        form = GateForm(self.eps, max(1, self.groups), self.gate_first, self.activation)
        return gated_norm(x, gate, weight, form)


def known_gated_norm(norm: nn.Module) -> GatedNorm | None:
    """Return how a module norm(x, gate) computes; None if it is no gated RMSNorm.

    An Identity stands for no norm. Modules are recognised by what they hold and by what they return for random input.
    """
    if type(norm) is nn.Identity:
        return GatedNorm(0.0, 0, gate_first=True)
    weight, eps = norm._parameters.get("weight"), vars(norm).get("variance_epsilon")
    if norm._parameters.keys() != {"weight"} or norm._modules or norm._buffers or not isinstance(eps, float):
        return None
    if weight is None or weight.ndim != 1 or weight.dtype not in FLOATS:
        return None
    own = vars(norm)
    activation = GATE_ACTIVATIONS.get(own.get("activation", "silu"))
    if activation is None:
        return None
    counts = {1, own.get("n_groups") or 1, len(weight) // (own.get("group_size") or len(weight))}
    forms = [GatedNorm(eps, groups, first, activation) for groups, first in product(sorted(counts), (True, False))]
    return next((form for form in forms if _agrees(norm, form, len(weight))), None)


@torch.no_grad()
def _agrees(norm: nn.Module, form: GatedNorm, width: int) -> bool:
    numbers = RandomNumbers()
    weight, x, gate = numbers(width), numbers(1, 3, width), numbers(1, 3, width)
    twin: Any = unwatched_twin(norm, _parameters={"weight": nn.Parameter(weight)})
    theirs: Callable[..., Tensor] = original_class(norm).forward
    return agree(
        lambda: theirs(twin, x, gate)[0], lambda: form(x[0], gate[0], weight), Tolerance(roundings=32, absolute=1e-5)
    )
