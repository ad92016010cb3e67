"""The operations of a layer, which its trace consists of."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

Kind = Literal[
    "linear", "gated", "norm", "rope", "write", "attend", "add", "layer_norm", "activation", "gate", "scale", "join",
    "position_scores", "affine", "attend_source", "short_conv", "delta_rule", "state_scan", "gated_norm",
    "take_heads", "bias_gates", "row_conv", "multiply", "convert", "module", "page_conv",
    "time_steps", "head_products", "by_position",
]  # fmt: skip

INPUT, OUTPUT = 0, 1  # the buffers of a layer's input and output, by their numbers in the kernels


class UntraceableError(Exception):
    """The code does something that the stand-ins do not know; the message names it, as a clause."""


class WidthError(UntraceableError):
    """A linear layer takes another number of inputs than it is given: the states may have another width."""


def reason_of_failure(error: Exception) -> str:
    """Return why code has no trace that fails on a stand-in by an error of its own, as a clause on one line."""
    message = next(iter(str(error).splitlines()), "").rstrip(" :")
    missing = re.search(r"missing \d+ required positional arguments?: (.+)", message)
    if missing:
        return f"it is given {missing[1].replace(chr(39), '')} too, which no trace follows"
    for name, asked in ASKED_OF_STAND_INS.items():
        if re.search(rf"\b{name}\b", message):
            return f"it does more with {asked} than a trace follows"
    return f"its code needs values where a trace has none: {type(error).__name__}, {message}"


# What code has in its hands, by the names of the stand-ins, and of tuples that stand for tables.
ASKED_OF_STAND_INS = {
    "Count": "the number of tokens", "Vector": "a parameter", "StandIn": "a tensor", "ModuleStandIn": "a module",
    "Opaque": "a tensor that it is given", "Scores": "the scores of its attention", "NoneType": "what it is not given",
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Columns of a buffer whose rows are tokens: the columns from `offset` on, in rows of `stride` numbers.

    head: the stride between heads, of which each has numbers in between that are not of these columns; 0 if there are
    none.
    """

    buffer: int
    offset: int
    stride: int
    head: int = 0


@dataclass
class Operation:
    """One operation of a layer.

    modules: linears, a norm, or the attention module. values: the kernel's other arguments.
    """

    kind: Kind
    inputs: list[Span]
    outputs: list[Span]
    modules: tuple[nn.Module, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
