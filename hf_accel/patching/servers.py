"""Who multiplies by the weight of each linear layer when a model is patched."""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import Enum, auto

from torch import nn

from ..linear import QuantLinear
from ..linear.backends.cpu import Cpu
from ..models import modules_by_name
from ..parallel.tensor import TensorParallel
from ..recognition.unchanged import has_own_forward
from .weight_plan import WeightPlan


class Server(Enum):
    """Who multiplies by the weight of a linear layer when the model is patched."""

    KERNELS = auto()  # the native library, alone or as a step of a whole layer
    BACKEND = auto()  # another backend of ours
    RANKS = auto()  # several processes, for which no call can wait in its middle
    FOREIGN = auto()  # bitsandbytes, or a forward that was put on the module
    TORCH = auto()


def servers_of(
    model: nn.Module, planned: Mapping[nn.Module, WeightPlan], floats: Container[nn.Module],
    split: TensorParallel | None,
) -> dict[nn.Module, Server]:  # fmt: skip
    """Return the Server of each linear layer. planned: the replaced ones. floats: those with a native forward."""

    def server(name: str, module: nn.Module) -> Server:
        plan = planned.get(module)
        if has_own_forward(module) if plan is None else plan.config.is_nf4:
            return Server.FOREIGN
        if split is not None and split.joins(name):
            return Server.RANKS
        choice = plan.choice if plan is not None else module.choice if isinstance(module, QuantLinear) else None
        if choice is None:
            return Server.KERNELS if module in floats else Server.TORCH
        return Server.KERNELS if isinstance(choice.backend, Cpu) else Server.BACKEND

    return {
        m: server(n, m) for n, m in modules_by_name(model) if m in planned or m in floats or isinstance(m, nn.Linear)
    }
