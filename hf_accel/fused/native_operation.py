"""The native call of an operation of a layer: the base of its kinds, and what they are given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.cpu.library import FLOATS
from ..kernels.cpu.row_conv import RowNorm
from ..recognition.operation import INPUT, Operation, Span, UntraceableError
from ..recognition.symbols import Vector
from .encoder_rows import NOTHING, CallTensors, RowLayout
from .projections import NativeCall
from .traced_layer import Attention, Traced


class NativeParts(Traced):
    """A traced layer whose operations are native calls.

    calls, norms, tensors: hold the memory that the structs of the operations point to. max_tokens: the most tokens of
    a call.
    table_size: the numbers of cos of a token; None if it has none, or as many as a head.
    over_rows: whether its attention reads the keys of the call's own rows, and not those of pages. source_attention:
    its attention to an encoder's output, None without.
    """

    over_rows: bool
    table_size: int | None = None
    source_attention: Attention | None = None
    max_tokens: int
    calls: list[NativeCall]
    norms: list[RowNorm]
    tensors: list[Tensor]

    def address(self, tensor: Tensor) -> int:
        """Return where a tensor's memory is, which must stay there."""
        self.tensors.append(tensor)
        return tensor.data_ptr()


class Planned(NamedTuple):
    """The plan of a layer that is still to be patched.

    linears: the linear layers that will have a native call; None where they are called as modules. over_rows: whether
    it is one over rows, on the CPU.
    """

    dtype: torch.dtype
    linears: Container[nn.Module] | None
    device_type: str
    over_rows: bool = False


class HeldRows:
    """The tensors of a call over rows whose operations are called one by one, [N, width] by buffer."""

    def __init__(
        self, parts: NativeParts, x: Tensor, layout: RowLayout | None = None, tensors: CallTensors = NOTHING
    ) -> None:
        self.parts = parts
        self._layout = layout
        self.tables, bias, self.written, self.positions = tensors
        self.bias = None if bias is None else bias.table
        self.buffers = {INPUT: x}

    @property
    def layout(self) -> RowLayout:
        """The places of the rows, where operations look at them."""
        assert self._layout is not None
        return self._layout

    def columns(self, span: Span, width: int) -> Tensor:
        """Return columns of a buffer, [N, width]."""
        buffer = self.buffers[span.buffer]
        return buffer if buffer.shape[1] == width else buffer.narrow(1, span.offset, width)

    def heads(self, span: Span, heads: int, dim: int) -> Tensor:
        """Return columns of a buffer, [N, heads, dim]."""
        return self.columns(span, heads * dim).view(-1, heads, dim)


class NativeOperation(ABC):
    """The native calls of operations of one kind. over_rows: whether it has one over rows."""

    over_rows = True

    def refusal(self, operation: Operation, planned: Planned) -> str | None:
        """Return why a layer that is planned so will have no native call for this, as a clause; None if it will."""
        return None

    @abstractmethod
    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        """Return the fields of its struct, besides its places. Raises UntraceableError."""

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        """Return its results over rows, [N, width]."""
        raise UntraceableError(f"{operation.kind} has no native call over rows")


class ModuleOperation(NativeOperation):
    """The call of a module, between native calls."""

    over_rows = False

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        raise UntraceableError("it calls a module within a native call")


def sinks_of(operation: Operation) -> Vector | None:
    """Return the sinks that attention to a layer's own pages is given; None if it is given none."""
    options = operation.values.get("options", {}) if operation.kind == "attend" else {}
    sinks = options.get("s_aux", options.get("sinks"))
    return sinks if isinstance(sinks, Vector) and sinks.parameter.dtype in FLOATS else None
