"""Records of parts that several recurrent modules have: linear layers and short convolutions."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...recognition.operation import UntraceableError
from ...recognition.stand_ins import StandIn


def record_linear(module: nn.Module, x: StandIn) -> StandIn:
    """Record a linear layer of a module. Raises UntraceableError for one that an adapter is around."""
    if not isinstance(module, nn.Linear):
        raise UntraceableError("a linear layer has no native call")
    trace: Any = x.trace
    recorded: StandIn = trace.linear(module, x)
    return recorded


def record_convolution(conv: Any, x: StandIn) -> StandIn:
    """Record the short convolution in front of a recurrence and its silu. Returns float32."""
    trace: Any = x.trace
    trace.visit(conv)
    recorded: StandIn = trace.put(
        "short_conv", [x], trace.floats * x.width, dim=x.width, value_dim=conv.kernel_size[0], activation="silu",
        weight=conv._parameters["weight"], bias=conv._parameters["bias"],
    )  # fmt: skip
    return recorded
