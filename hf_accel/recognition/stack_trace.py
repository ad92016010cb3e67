"""The trace of an encoder that calls known layers one after the other."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from ..undo.journal import original_class
from .call_form import BIAS, CACHES, CallForm, bound
from .operation import INPUT, Span, UntraceableError
from .stand_ins import StandIn
from .trace import Trace


@dataclass(frozen=True)
class LayerOfStack:
    """A layer that an encoder calls, and the form of this call."""

    layer: nn.Module
    form: CallForm


class StackTrace(Trace):
    """One run of the code of an encoder, which must call known layers one after the other and nothing else.

    layers: the modules that are known to be encoder layers. called: those that the code called. outcome: makes the
    result of the code from a tensor.
    """

    def __init__(self, dtype: torch.dtype, layers: Container[nn.Module]) -> None:
        super().__init__(dtype)
        self.layers, self.called = layers, list[LayerOfStack]()
        self._last: StandIn | None = None
        self._kind: type | None = None
        self._name = ""

    def stack(self, encoder: nn.Module, width: int, form: CallForm) -> None:
        """Run the forward of an encoder on [B, T, width]. Raises UntraceableError."""
        result = self.call(encoder, width, form)
        if is_dataclass(result) and not isinstance(result, type | StandIn):
            held = {each.name: getattr(result, each.name) for each in fields(result)}
            self._kind = type(result)
            (self._name, result), *others = [item for item in held.items() if item[1] is not None] or [("", None)]
            if others:
                raise UntraceableError("it returns more than the last hidden states")
        if result is not self._last or not self.called:
            raise UntraceableError("it returns something else than what its last layer did")

    def outcome(self, out: torch.Tensor) -> Any:
        return out if self._kind is None else self._kind(**{self._name: out})

    def child(self, module: nn.Module) -> Any:
        if isinstance(module, nn.ModuleList):
            return super().child(module)
        if module in self.layers:
            return lambda *args, **kwargs: self._layer(module, args, kwargs)
        raise UntraceableError("it calls more than its layers")

    def _layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = bound(original_class(layer), args, kwargs)
        if given is None or not given[2].tensors.isdisjoint(CACHES):
            raise UntraceableError("it calls a layer with more than plain values")
        x, mask, form = given
        if BIAS in form.tensors:
            raise UntraceableError("it gives its layers a bias")
        whole = Span(INPUT, 0, self.widths[INPUT])
        is_next = x is self._last if self.called else isinstance(x, StandIn) and x.span == whole and x.factor == 1
        if not is_next or mask not in (None, self.mask):
            raise UntraceableError("it gives a layer something else than what the one before it returned")
        self.called.append(LayerOfStack(layer, form))
        self._last = StandIn(self, self.buffer(self.widths[INPUT]), self.widths[INPUT])
        return self._last
