"""Encoder layers of transformers that run by their trace, over tokens that stand end to end without padding.

A layer is one native call. Where an encoder does nothing but call such layers, and nobody wants to see what goes from
one to the next, padding is left out once for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers.utils import output_capturing

from ...attention import PlannedAttention
from ...attention.cpu import LARGEST_DIM, CpuBackend
from ...kernels.cpu.library import native
from ...recognition.encoder_trace import MASK, CallForm, EncoderTrace, LayerOfStack, StackTrace, bound
from ...recognition.trace import UntraceableError
from ...recognition.unchanged import GLOBAL_HOOKS, HOOKS, Read, Reads, has_own_forward
from ...undo.instance import Mixin, original_class
from ...undo.state import BACKEND_ATTRIBUTE, FUSED
from ..encoder_programme import EncoderProgramme, RowLayout, layout_of
from .layer_calls import attend_of

HIDDEN_STATES = {"hidden_states", "_hidden_states_layers"}  # what transformers collects from layers themselves


class EncoderForward(Mixin):
    """Is mixed into an encoder layer, or into an encoder. A known call is native; others run its own code."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[B, T, hidden] -> [B, T, hidden], with zeros at padding if the call was native."""
        if is_compiling():  # a compiler could not follow into a trace
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        calls: EncoderCalls = self.__dict__[FUSED]
        result = calls.run(self, args, kwargs)  # type: ignore[arg-type]
        return super().forward(*args, **kwargs) if result is None else result  # type: ignore[misc]


Kind = tuple[CallForm, torch.dtype, int]  # of a call: its arguments, the dtype and the width of the hidden states


class EncoderCalls(ABC):
    """The trace of one module. It is made at the first call, and again when something has changed that it depends on.

    A copy or a pickle starts without it, because it may hold addresses.
    """

    def __init__(self) -> None:
        self.kind: Kind | None = None  # of the call that was traced
        self._failed: Reads | None = None  # the reads of a trace that could not be made

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's result; None if its own code must run."""
        given = bound(original_class(module), args, kwargs)
        if given is None or not native(given[0]):
            return None
        x, mask, form = given
        if x.ndim != 3 or x.numel() == 0 or not self.is_ready(module, (form, x.dtype, x.shape[2])):
            return None
        layout = layout_of(mask, x.shape[0], x.shape[1])
        return None if layout is None else self.compute(x, layout)

    def is_ready(self, module: nn.Module, kind: Kind) -> bool:
        """Return whether the trace stands for calls of this kind, and nobody wants to see a module that is in it."""
        same = kind == self.kind
        if same and self._failed is not None and self._failed.hold():
            return False
        if not same or self._failed is not None or not self.is_current():
            self.kind, self._failed = kind, None
            reads: list[Read] = []
            try:
                self.make(module, kind, reads)
            except UntraceableError:
                self._failed = Reads(reads)
                return False
        return self.is_unobserved()

    @abstractmethod
    def make(self, module: nn.Module, kind: Kind, reads: list[Read]) -> None:
        """Trace a call of the module. Raises UntraceableError, when `reads` are what this depends on."""

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether all that the trace has read is the same."""

    @abstractmethod
    def is_unobserved(self) -> bool:
        """Return whether no hook would notice that modules are not called."""

    @abstractmethod
    def compute(self, x: Tensor, layout: RowLayout) -> Any:
        """x: [B, T, width] -> what the module's code would return."""


class EncoderLayerCalls(EncoderCalls):
    """The EncoderCalls of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.programme: EncoderProgramme | None = None

    def __reduce__(self) -> Any:
        return EncoderLayerCalls, ()

    def make(self, module: nn.Module, kind: Kind, reads: list[Read]) -> None:
        form, dtype, width = kind
        trace = EncoderTrace(dtype)
        trace.reads = reads
        trace.encoder_layer(module, width, form)
        self.programme = EncoderProgramme(trace, scale_of(trace, masked=MASK in form.tensors))

    def is_current(self) -> bool:
        return self.programme is not None and self.programme.is_current()

    def is_unobserved(self) -> bool:
        assert self.programme is not None
        collected = output_capturing._active_collector.get()
        if collected and not HIDDEN_STATES.issuperset(collected):
            return False
        return all(map(_only_collects, self.programme.hooks()))

    def compute(self, x: Tensor, layout: RowLayout) -> Any:
        assert self.programme is not None
        out = layout.padded(self.programme(layout.rows(x), layout))
        return (out, *[None] * (self.programme.arity - 1)) if self.programme.arity else out


class EncoderStackCalls(EncoderCalls):
    """The EncoderCalls of an encoder, all of whose layers have EncoderLayerCalls."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: StackTrace | None = None
        self._layers: list[tuple[LayerOfStack, EncoderLayerCalls, Kind]] = []
        self._types: list[type] = []
        self._reads = Reads(())

    def __reduce__(self) -> Any:
        return EncoderStackCalls, ()

    def make(self, module: nn.Module, kind: Kind, reads: list[Read]) -> None:
        form, dtype, width = kind
        known = {each for each in module.modules() if isinstance(vars(each).get(FUSED), EncoderLayerCalls)}
        self.trace = trace = StackTrace(dtype, known)
        trace.reads = reads
        trace.stack(module, width, form)
        layers = [(each, vars(each.layer)[FUSED], (each.form, dtype, width)) for each in trace.called]
        self._types = [type(each.layer) for each in trace.called]
        if not all(issubclass(each, EncoderForward) for each in self._types):
            raise UntraceableError("a layer has another forward")
        for each, calls, _ in layers:
            reads.append(Read(vars(each.layer), FUSED, calls))
        self._layers, self._reads = layers, Reads(reads)

    def is_current(self) -> bool:
        return self._reads.hold() and [type(each.layer) for each, _, _ in self._layers] == self._types

    def is_unobserved(self) -> bool:
        if output_capturing._active_collector.get() or any(GLOBAL_HOOKS):
            return False
        assert self.trace is not None
        if not all(_only_collects(hook) for hooks in self.trace.hooks for hook in hooks.values()):
            return False
        for each, calls, kind in self._layers:
            own = vars(each.layer)
            if has_own_forward(each.layer) or not all(_only_collects(h) for name in HOOKS for h in own[name].values()):
                return False
            if not calls.is_ready(each.layer, kind) or calls.programme is None or calls.programme.arity:
                return False
        return True

    def compute(self, x: Tensor, layout: RowLayout) -> Any:
        assert self.trace is not None
        rows = layout.rows(x)
        for _, calls, _ in self._layers:
            assert calls.programme is not None
            rows = calls.programme(rows, layout)
        return self.trace.outcome(layout.padded(rows))


def _only_collects(hook: Any) -> bool:
    """Return whether a hook is transformers' own, which collects what a module returns where a call asks for it."""
    return getattr(hook, "__code__", None) in COLLECTING


COLLECTING = frozenset(
    code for code in output_capturing.install_output_capuring_hook.__code__.co_consts if hasattr(code, "co_name")
)


def scale_of(trace: EncoderTrace, *, masked: bool) -> float:
    """Return the scale of the trace's attention, which must be that of all tokens to all. Raises UntraceableError.

    masked: whether the call has a mask.
    """
    operation, scale, causal = attend_of(trace)
    (module,), values = operation.modules, operation.values
    planned: PlannedAttention | None = vars(module).get(BACKEND_ATTRIBUTE)
    trace.note(vars(module), BACKEND_ATTRIBUTE, planned)
    limited = [name for name in ("softcap", "sliding_window") if values["options"].get(name)]
    if causal or limited or values["masked"] is not masked:
        raise UntraceableError("its attention is not that of all tokens to all that the mask shows")
    if planned is not None and not isinstance(planned.backend, CpuBackend):
        raise UntraceableError("its attention has another backend")
    if values["dim"] > LARGEST_DIM:
        raise UntraceableError("its heads are too large")
    return scale
