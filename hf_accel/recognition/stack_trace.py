"""The trace of an encoder that calls known layers one after the other."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..undo.journal import original_class
from .call_form import BIAS, CACHES, MASK, CallForm, argument, bound
from .operation import INPUT, Span, UntraceableError
from .stand_ins import StandIn
from .symbols import BATCH, TOKENS, OfSizes
from .trace import Trace
from .unchanged import PLAIN_TYPES


@dataclass(frozen=True)
class LayerOfStack:
    """A layer that an encoder calls, and the form of this call.

    given: what stands for the tensors besides states and mask. in_tuple: whether the code takes the first of what the
    layer returns.
    """

    layer: nn.Module
    form: CallForm
    given: dict[str, Any]
    in_tuple: bool = False


@dataclass(eq=False)
class LayerResult(StandIn):
    """The result of a layer: a tensor, or a tuple of which the code may take the first, but nothing else."""

    def __getitem__(self, index: Any) -> StandIn:
        if type(index) is int and index == 0:
            trace: Any = self.trace
            first: StandIn = trace.first_of(self)
            return first
        return super().__getitem__(index)


class StackTrace(Trace):
    """One run of the code of an encoder, which must call known layers one after the other; and ahead of them and after
    them, linear layers and LayerNorms, which compute each token by itself.

    layers: the modules that are known to be encoder layers. called: those that the code called. before, after: the
    other modules that it called. width: of what the layers are given. outcome: makes the result of the code from a
    tensor.
    """

    def __init__(self, dtype: torch.dtype, layers: Container[nn.Module]) -> None:
        super().__init__(dtype)
        self.layers, self.called = layers, list[LayerOfStack]()
        self.before, self.after = list[nn.Module](), list[nn.Module]()
        self.width = 0
        self._last: StandIn | None = None
        self._kind: type | None = None
        self._name = ""

    def stack(self, encoder: nn.Module, width: int, form: CallForm) -> None:
        """Run the forward of an encoder on [B, T, width]. Raises UntraceableError."""
        self.width = width
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
        if isinstance(module, nn.Linear) or type(module) is nn.LayerNorm:
            return lambda x: self._by_token(module, x)
        if isinstance(module, nn.Embedding):  # of positions
            self.visit(module)
            return partial(self._of_sizes, module)
        raise UntraceableError("it calls more than its layers")

    def _of_sizes(self, module: nn.Module, sizes: Any, *args: Any) -> OfSizes:
        plain = isinstance(sizes, tuple) and len(sizes) == 2 and sizes[0] is BATCH and sizes[1] is TOKENS
        if not plain or not all(isinstance(each, PLAIN_TYPES) for each in args):
            raise UntraceableError("it calls more than its layers")
        return OfSizes(module, (sizes, *args))

    def _is_next(self, x: Any) -> bool:
        """Return whether x is what the encoder is given, or what it has made of that so far."""
        if self._last is not None:
            return x is self._last
        return isinstance(x, StandIn) and x.span == Span(INPUT, 0, self.widths[INPUT]) and x.factor == 1

    def _by_token(self, module: nn.Module, x: Any) -> StandIn:
        if not self._is_next(x):
            raise UntraceableError("it computes more than what its layers are given and return")
        self._last = self.layer_norm(module, x) if isinstance(module, nn.LayerNorm) else self.linear(module, x)
        if self.called:
            self.after.append(module)
        else:
            self.before.append(module)
            self.width = self._last.width
        return self._last

    def first_of(self, result: LayerResult) -> StandIn:
        """Return the first of what a layer returned."""
        if result is not self._last:
            raise UntraceableError("it takes the result of a layer that is not the last")
        self.called[-1] = replace(self.called[-1], in_tuple=True)
        self._last = StandIn(self, result.span, result.width)
        return self._last

    def _layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = original_class(layer)
        given = bound(kind, args, kwargs)
        if given is None or not given[2].tensors.isdisjoint(CACHES):
            raise UntraceableError("it calls a layer with more than plain values")
        x, mask, form = given
        if BIAS in form.tensors:
            raise UntraceableError("it gives its layers a bias")
        if not self._is_next(x) or self.after or mask not in (None, self.mask):
            raise UntraceableError("it gives a layer something else than what the one before it returned")
        others = {name: argument(kind, name, args, kwargs) for name in form.tensors if name != MASK}
        self.called.append(LayerOfStack(layer, form, others))
        self._last = LayerResult(self, self.buffer(self.width), self.width)
        return self._last
