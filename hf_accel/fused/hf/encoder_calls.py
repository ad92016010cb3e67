"""Encoder layers of transformers that run by their trace, over tokens that stand end to end without padding.

A layer is one native call. Where an encoder does nothing but call such layers, and nobody wants to see what goes from
one to the next, padding is left out once for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from ...attention.hf.mask import as_known
from ...attention.hf.stock import ATTENTION_NAME, SDPA
from ...kernels.cpu.library import native
from ...recognition.call_form import (
    BIAS,
    CACHES,
    MASK,
    STARTS,
    TABLES,
    CallForm,
    argument,
    bound,
)
from ...recognition.known_module import Said
from ...recognition.operation import UntraceableError
from ...recognition.padding_readers import PaddingReaders
from ...recognition.stack_trace import StackTrace
from ...recognition.symbols import OfSizes
from ...recognition.trace import Trace
from ...recognition.unchanged import GLOBAL_HOOKS, HOOKS, Read, Reads, has_own_forward, is_derived
from ...undo.journal import Mixin, original_class
from ...undo.state import FUSED
from ..encoder_programme import Causal, EncoderProgramme
from ..encoder_rows import CallTensors, RowLayout
from .encoder_checks import is_empty, layout_for, refuse_functions_of_users, scale_of
from .layer_attention import attend_of, note_registered, sees_all

HIDDEN_STATES = {"hidden_states", "_hidden_states_layers"}  # what transformers collects from layers themselves


class EncoderForward(Mixin):
    """Is mixed into an encoder layer, or into an encoder. A known call is native; others run its own code."""

    asks_itself = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[B, T, hidden] -> [B, T, hidden], with zeros at padding where that was left out."""
        if is_compiling():  # a compiler could not follow into a trace
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        calls: EncoderCalls = self.__dict__[FUSED]
        result = calls.run(self, args, kwargs)  # type: ignore[arg-type]
        return super().forward(*args, **kwargs) if result is None else result  # type: ignore[misc]


# Of a call: its arguments, the dtype and the width of the hidden states, and the meaning of a mask that is causal.
Kind = tuple[CallForm, torch.dtype, int, Causal | None]
MOST_KINDS = 8  # of calls that are kept


@dataclass(frozen=True)
class Computation:
    """A computation of a call in place of the module's code.

    run: [B, T, width], its layout, and its other tensors -> what the code would return. first: the first
    layer's programme, which knows the layout of a mask, what else is read, and whether keys and values are written.
    given: what an encoder gives its first layer besides states and mask; None where the module is the layer.
    """

    run: Callable[[Tensor, RowLayout, CallTensors], Any]
    first: EncoderProgramme
    given: dict[str, Any] | None = None

    def said(self, said: Said, shape: tuple[int, int]) -> Said:
        """Return what gives the first layer's arguments, by what gives the module's for a batch [B, T]."""
        given = self.given
        return said if given is None else lambda name: _value(given.get(name), said, shape)


def _value(given: Any, said: Said, shape: tuple[int, int]) -> Any:
    """Return what an encoder gives its layers. given: what stood for it."""
    if isinstance(given, OfSizes):
        return given(shape)
    return None if given is None else said(TABLES if isinstance(given, tuple) else given.name)


class Known(ABC):
    """The knowledge about calls of one kind of one module."""

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether all that this was made of is the same."""

    @abstractmethod
    def computation(self) -> Computation | None:
        """Return what computes such a call; None if the module's own code must, as where a hook wants to see a module
        that is not called.
        """


class UnknownCode(Known):
    """The module's code could not be traced."""

    def __init__(self, reads: list[Read]) -> None:
        self._reads = Reads(reads)

    def is_current(self) -> bool:
        return self._reads.hold()

    def computation(self) -> None:
        return None


class EncoderCalls(ABC):
    """The knowledge about the calls of one module, which is traced at the first call of each kind, and again when
    something has changed that this depends on.

    A copy or a pickle starts without it, because it may hold addresses.
    readers: the code of others that may read padding: the module may return zeros there while there is none. Where
    this is None, padding is always computed too.
    """

    def __init__(self, readers: PaddingReaders | None) -> None:
        self.readers = readers
        self._known: dict[Kind, Known] = {}

    def __reduce__(self) -> Any:
        return type(self), (self.readers,)

    @property
    def leaves_padding(self) -> bool:
        """Return whether padding is left out where no code of others may read it."""
        return self.readers is not None

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's result; None if its own code must run."""
        given = bound(original_class(module), args, kwargs)
        if given is None or not native(given[0]):
            return None
        x, mask, form = given
        if x.ndim != (3 if form.in_rows else 2) or x.numel() == 0:
            return None
        own = original_class(module)
        shape = tuple(x.shape[:-1]) if form.in_rows else (1, len(x))
        cache: Any = None
        for name in form.tensors.intersection(CACHES):
            cache = argument(own, name, args, kwargs)
            if type(cache) is not DynamicCache or x.shape[1] == 1:  # such as the next token of a text
                return None
        ours = as_known(mask)
        causal = None if ours is None else Causal(ours.meaning.window)
        compute = self.known(module, (form, x.dtype, x.shape[-1], causal)).computation()
        if compute is None:
            return None
        first = compute.first
        if STARTS in form.tensors:
            layout = first.layout_of_starts(argument(own, STARTS, args, kwargs), shape, in_rows=form.in_rows)
        else:
            layout = layout_for(first, mask, *shape)
        if layout is None:
            return None
        if layout.index is not None and (self.readers is None or self.readers.may_read(self, mask)):
            layout = first.with_padding(layout)
            if layout is None:
                return None
        said = partial(argument, own, args=args, kwargs=kwargs)
        tensors = first.tensors_of(layout, compute.said(said, layout.shape))
        if tensors is None:
            return None
        written = first.to_write(layout)
        if written is None:
            return compute.run(x, layout, tensors)
        if not is_empty(cache, first.layer_idx):
            return None
        result = compute.run(x, layout, tensors._replace(written=written))
        cache.update(written.k, written.v, first.layer_idx)
        return result

    def known(self, module: nn.Module, kind: Kind) -> Known:
        """Return what is known of calls of this kind now."""
        known = self._known.get(kind)
        if known is None or not known.is_current():
            if len(self._known) >= MOST_KINDS:
                self._known.clear()
            reads: list[Read] = []
            try:
                known = self.make(module, kind, reads)
            except UntraceableError:
                known = UnknownCode(reads)
            self._known[kind] = known
        return known

    @abstractmethod
    def make(self, module: nn.Module, kind: Kind, reads: list[Read]) -> Known:
        """Trace a call of the module. Raises UntraceableError, when `reads` are what this depends on."""


class EncoderLayerCalls(EncoderCalls):
    """The EncoderCalls of a layer.

    keeps_sdpa: whether the model keeps torch's attention, as those that have decoders too do; this layer computes the
    same by its native call.
    """

    def __init__(self, readers: PaddingReaders | None, keeps_sdpa: bool = False) -> None:
        super().__init__(readers)
        self.keeps_sdpa = keeps_sdpa

    def __reduce__(self) -> Any:
        return type(self), (self.readers, self.keeps_sdpa)

    def make(self, module: nn.Module, kind: Kind, reads: list[Read]) -> KnownEncoderLayer:
        form, dtype, width, causal = kind
        trace = Trace(dtype)
        trace.reads, trace.may_return_weights = reads, True
        refuse_functions_of_users(trace, module)
        if self.keeps_sdpa:
            note_registered(trace, SDPA)
            if ALL_ATTENTION_FUNCTIONS[SDPA] is sdpa_attention_forward:
                trace.equals[SDPA] = ATTENTION_NAME
        trace.layer(module, width, form)
        operation, _, is_causal = attend_of(trace)
        if MASK not in form.tensors and is_causal and not sees_all(operation, masked=False):
            causal = Causal()  # to all before it: our attention reads windows in masks
        if causal is not None and any(name == "is_causal" for name, _, _ in form.plain):
            causal = causal._replace(first_counts=True)  # CLIP's texts, which read it if no token ends the text
        masked, is_causal = MASK in form.tensors, causal is not None
        scale = scale_of(trace, masked=masked, causal=is_causal, keeps_sdpa=self.keeps_sdpa)
        return KnownEncoderLayer(EncoderProgramme(trace, scale, form.table_dtype, causal=causal))


class KnownEncoderLayer(Known):
    """A layer that is one native call."""

    def __init__(self, programme: EncoderProgramme) -> None:
        self.programme = programme

    def is_current(self) -> bool:
        return self.programme.is_current()

    def computation(self) -> Computation | None:
        if self.programme.returns_weights:  # who calls the layer may read them
            return None
        return self.of_states()

    def of_states(self) -> Computation | None:
        """Return the computation for who reads nothing but the states that the layer returns."""
        collected = output_capturing._active_collector.get()
        if collected and not HIDDEN_STATES.issuperset(collected):
            return None
        if not all(map(_only_collects, self.programme.hooks())):
            return None
        return Computation(self._compute, self.programme)

    def _compute(self, x: Tensor, layout: RowLayout, tensors: CallTensors) -> Any:
        out = layout.padded(self.programme(layout.rows(x), layout, tensors))
        others, bias = self.programme.others, tensors.bias
        if others is None:
            return out
        return (out, *[None if other is None or bias is None else bias.given for other in others])


class EncoderStackCalls(EncoderCalls):
    """The EncoderCalls of an encoder, all of whose layers have EncoderLayerCalls."""

    def make(self, module: nn.Module, kind: Kind, reads: list[Read]) -> KnownStack:
        form, dtype, width, causal = kind
        known = {each for each in module.modules() if isinstance(vars(each).get(FUSED), EncoderLayerCalls)}
        trace = StackTrace(dtype, known)
        trace.reads = reads
        trace.stack(module, width, form)
        return KnownStack(trace, [(each.layer, (each.form, dtype, trace.width, causal)) for each in trace.called])


class KnownStack(Known):
    """An encoder that does nothing but call layers. layers: each of them, and the kind of its call."""

    def __init__(self, trace: StackTrace, layers: list[tuple[nn.Module, Kind]]) -> None:
        self._trace, self._layers = trace, layers
        self._types = [type(layer) for layer, _ in layers]
        self._calls: list[EncoderLayerCalls] = [vars(layer)[FUSED] for layer, _ in layers]
        for layer, calls in zip(trace.called, self._calls, strict=True):
            trace.note(vars(layer.layer), FUSED, calls)
        if not all(issubclass(each, EncoderForward) and not is_derived(each) for each in self._types):
            raise UntraceableError("a layer has another forward")
        self._reads = Reads(trace.reads)

    def is_current(self) -> bool:
        return self._reads.hold() and [type(layer) for layer, _ in self._layers] == self._types

    def computation(self) -> Computation | None:
        if output_capturing._active_collector.get() or any(GLOBAL_HOOKS):
            return None
        hooks = [*self._trace.hooks, *(vars(layer)[name] for layer, _ in self._layers for name in HOOKS)]
        if not all(_only_collects(hook) for each in hooks for hook in each.values()):
            return None
        programmes: list[EncoderProgramme] = []
        for calls, called, (layer, kind) in zip(self._calls, self._trace.called, self._layers, strict=True):
            known = None if has_own_forward(layer) else calls.known(layer, kind)
            if not isinstance(known, KnownEncoderLayer) or known.of_states() is None:
                return None
            others, in_tuple = known.programme.others, called.in_tuple
            if (others is not None) is not in_tuple or BIAS in (others or ()) or known.programme.biased_heads:
                return None  # it has more than rows to pass on
            programmes.append(known.programme)
        if len({(each.window, each.causal) for each in programmes}) > 1:  # one mask is not that of all of them
            return None
        given = self._trace.called[0].given
        same = all(each.given == given for each in self._trace.called) and programmes[0].positions is None
        if not same or len({each.reading for each in programmes}) > 1:
            return None
        return Computation(partial(self._compute, programmes), programmes[0], given)

    def _compute(self, programmes: list[EncoderProgramme], x: Tensor, layout: RowLayout, tensors: CallTensors) -> Any:
        rows = layout.rows(x)
        for module in self._trace.before:
            rows = module(rows)
        free: Tensor | None = None
        for number, programme in enumerate(programmes):
            out = programme(rows, layout, tensors, out=free)
            # Two tensors take turns, since the system clears memory that it gives; x is the caller's.
            rows, free = out, rows if number or layout.index is not None else None
        for module in self._trace.after:
            rows = module(rows)
        return self._trace.outcome(layout.padded(rows))


def _only_collects(hook: Any) -> bool:
    """Return whether a hook is transformers' own, which collects what a module returns where a call asks for it."""
    return getattr(hook, "__code__", None) in COLLECTING


COLLECTING = frozenset(
    code for code in output_capturing.install_output_capuring_hook.__code__.co_consts if hasattr(code, "co_name")
)
