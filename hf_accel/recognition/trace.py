"""The trace of a layer, or of the encoder that calls such layers: its operations, found by running its code once with
stand-ins for tensors and modules.

A stand-in knows only what is written here. Whatever else the code asks of it raises UntraceableError: nothing is
guessed, and the layer keeps its own forward. All that the code reads (attributes, submodules) is noted, so that a
later change is noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..undo.journal import original_class
from ..undo.state import FUSED
from .attention_record import AttentionRecord
from .cache_code import EXPANDS
from .call_form import (
    BIAS,
    BIASES,
    CACHE,
    CACHES,
    MASK,
    OF_LAYER,
    POSITION_IDS,
    SHARED_KEYS,
    SOURCE_BIAS,
    SOURCE_MASK,
    SOURCE_STATES,
    STARTS,
    TABLES,
    CallForm,
)
from .code import ROTATIONS, with_functions
from .complex_rotation import ROTATION_BY_COMPLEX, ComplexTable, rotate_by_complex, rotates_by_complex
from .expanded_keys import expand_latents
from .folding import folded
from .known_modules import known_module
from .left_keys import KEYS_LEFT, VALUES_LEFT, SharedKeys
from .linear_code import is_conv1d
from .model_stand_ins import CacheStandIn, ConfigStandIn, LinearStandIn, NormStandIn
from .of_positions import MadeOfTokens, OfPositions
from .operation import INPUT, OUTPUT, Span, UntraceableError, reason_of_failure
from .position_tables import TableStandIn
from .scores import AddedBias, Scores, SizeOfBias
from .source import results_of, without_renaming
from .source_stand_ins import PairStandIn, source_states
from .stand_ins import ModuleStandIn, StandIn, require
from .symbols import (
    BATCH,
    SOURCE,
    TOKENS,
    TOKENS_BEFORE,
    WEIGHTS_OF_ATTENTION,
    Computed,
    MaskStandIn,
    Opaque,
    Vector,
)
from .trial import (
    PLAIN_ACTIVATIONS,
    GatedNames,
    activation_name,
    gated_names,
    is_layer_norm,
    name_of_function,
    seems_rms_norm,
)
from .unchanged import PLAIN_TYPES

CPU = torch.device("cpu")
ENDS = ("add", "layer_norm", "affine", "multiply")  # the operations that a layer may end with
SIZE_OF_LAYER = "hidden_size_per_layer_input"  # the attribute of a layer that says how many numbers OF_LAYER has
WEIGHTS = "attention_weights"  # the name of those that a layer returns with its states


class Trace(AttentionRecord):
    """One run of the code of a layer, or of an encoder.

    attention: the name of the attention function that the model will have; None for its own. equals: names of
    attention functions that compute what another does. others: what the code returns in a tuple with its result, each
    None, BIAS, SOURCE_BIAS, CACHE or WEIGHTS; None if it returns a tensor alone. may_return_weights: whether it may
    return those of its attention, which whoever computes the layer must be sure that nobody reads. cache_class: the
    class of a cache which keeps keys of an encoder's output too; None if the code is given none. is_called: whether a
    module is called in each pass, with tensors, and not looked into. states_of: gives what is known of a module that
    keeps something else than keys and values, whose `recorded` records it; None for any other. stateful: that, and the
    module, if it keeps states.
    expands: whether a module is known to make keys and values of compressed ones by its method EXPANDS.
    takes_wide, gives_wide: whether its input, and its output, are float32, which its dtype is not.
    """

    may_return_weights = False
    cache_class: type | None = None
    is_called: Callable[[nn.Module], bool] = staticmethod(lambda module: False)
    states_of: Callable[[nn.Module], Any] = staticmethod(lambda module: None)
    expands: Callable[[nn.Module], bool] = staticmethod(lambda module: False)
    stateful: tuple[Any, nn.Module] | None = None
    takes_wide = gives_wide = False

    def __init__(
        self, dtype: torch.dtype, attention: str | None = None, *, table_size: int | None = None,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        super().__init__(dtype, table_size=table_size, device=device)
        self.attention = attention
        self.equals: dict[str, str] = {}
        self.others: tuple[str | None, ...] | None = None
        self.cache: PairStandIn | None = None
        self._ran = False  # whether the layer's own code has begun

    def layer(self, layer: nn.Module, width: int, form: CallForm) -> None:
        """Run the forward of a layer on [B, T, width]. Raises UntraceableError."""
        result = self.call(layer, width, form)
        if isinstance(result, tuple) and result and all(self._is_known(each) for each in result[1:]):
            names = {id(self.bias): BIAS, id(self.source_bias): SOURCE_BIAS, id(self.cache): CACHE, id(None): None}
            self.others = tuple(names.get(id(each), WEIGHTS) for each in result[1:])
            result = result[0]
        last = self.operations[-1] if self.operations else None
        attends = sum(operation.kind in ("attend", "page_conv") for operation in self.operations)
        if last is None or (attends != 1 and (attends or self.stateful is None)):
            raise UntraceableError("it does not attend once")
        if self.stateful is not None:
            known, module = self.stateful
            if self.layer_idx not in (None, known.layer_of(module)):
                raise UntraceableError("its parts keep what belongs to several layers")
            self.layer_idx = known.layer_of(module)
        written = {INPUT, *(span.buffer for operation in self.operations for span in operation.outputs)}
        written |= set() if self.of_layer is None else {self.of_layer.buffer}
        written |= set() if self.taken is None else {KEYS_LEFT, VALUES_LEFT}
        if not written.issuperset(span.buffer for operation in self.operations for span in operation.inputs):
            raise UntraceableError("it reads an activation again that it multiplied")
        whole = isinstance(result, StandIn) and result.shape == self._states.shape and result.factor == 1
        if not whole or [result.span] != last.outputs or last.kind not in ENDS:
            raise UntraceableError("it returns something else than its last sum, norm or product")
        self.refuse_overwritten()
        self.operations, self.gives_wide = folded(self.operations), result.wide
        self.widths[OUTPUT] = width * (self.floats if result.wide else 1)
        self.operations[-1].outputs[0] = Span(OUTPUT, 0, self.widths[OUTPUT])

    def decoder_layer(self, layer: nn.Module, width: int, form: CallForm) -> None:
        """Run `layer`; once more, with a cache that has the keys of an encoder's output, if it computes those.

        Raises UntraceableError also if the layer then computes something else.
        """
        self.layer(layer, width, form)
        if self.cache_class is None or self.source is None:
            return
        later = Trace(self.dtype, self.attention, table_size=self.table_size, device=self.device)
        later.cache_class, later.source, later.knows_source = self.cache_class, self.source, True
        later.tried, later.equals, later.is_called = self.tried, self.equals, self.is_called
        later.states_of, later.expands = self.states_of, self.expands
        later.layer(layer, width, form)
        if later.operations != self.operations or later.source_operations or later.others != self.others:
            raise UntraceableError("it computes something else where the cache has keys of an encoder's output")
        self.reads += later.reads
        self.hooks += later.hooks

    def _is_known(self, other: Any) -> bool:
        """Return whether a layer may return this with its result."""
        computed = isinstance(other, Scores) and other.is_softmax
        weights = self.may_return_weights and (computed or other is WEIGHTS_OF_ATTENTION)
        return (
            weights
            or (self.tried and computed)
            or any(  # code that was tried over pages gets None there
                other is each for each in (None, self.bias, self.source_bias, self.cache)
            )
        )

    def call(self, module: nn.Module, width: int, form: CallForm) -> Any:
        """Return the result of a module's code on hidden states [B, T, width]."""
        self.widths[OUTPUT] = width
        self.widths[INPUT] = width * (self.floats if self.takes_wide else 1)
        if self.cache_class is None:
            cache: Any = CacheStandIn(self)
        else:
            cache = self.cache = PairStandIn(self)
            self.mask, self.source_mask = MaskStandIn(MASK, TOKENS), MaskStandIn(SOURCE_MASK, SOURCE)
        if self.tried and self.cache_class is None:
            self.bias = AddedBias((SizeOfBias(),) * 3)
        tensors: dict[str, Any] = {name: Opaque(name) for name in form.tensors}
        tensors |= {MASK: self.mask, TABLES: self.tables} | dict.fromkeys(BIASES, self.bias)
        tensors[POSITION_IDS] = OfPositions(POSITION_IDS, counted=False, device=self.device)
        tensors |= dict.fromkeys(CACHES, cache)
        tensors |= {SOURCE_MASK: self.source_mask, SOURCE_STATES: source_states(self), STARTS: self.starts}
        tensors |= {SOURCE_BIAS: self.source_bias}
        tensors |= {SHARED_KEYS: SharedKeys(self)}
        if OF_LAYER in form.tensors:
            tensors[OF_LAYER] = self._of_layer(module)
        if form.one_table:
            tensors[TABLES] = ComplexTable(self.device) if rotates_by_complex(module) else Opaque(TABLES)
        self.given = {name: tensors[name] for name in form.tensors}
        if SOURCE_STATES in form.tensors and self.cache_class is None:
            raise UntraceableError("it attends to an encoder's output without a cache")
        kwargs = {name: value for name, _, value in form.plain} | self.given
        batch = BATCH if STARTS not in form.tensors else 1 if form.in_rows else None
        kwargs[form.states] = self._states = StandIn(
            self, Span(INPUT, 0, self.widths[INPUT]), width, batch=batch, wide=self.takes_wide
        )
        try:
            with MadeOfTokens():
                return self.run(ModuleStandIn(self, module), module, (), kwargs)
        except UntraceableError:
            raise
        except Exception as error:  # the code fails on a stand-in with an error of its own
            raise UntraceableError(reason_of_failure(error)) from error

    def _of_layer(self, module: nn.Module) -> Any:
        """Return what stands for numbers of each token that are the layer's own, [B, T, size]; see Record.of_layer."""
        size = vars(module).get(SIZE_OF_LAYER)
        if type(size) is not int or size < 1:
            return Opaque(OF_LAYER)
        self.of_layer = self.buffer(size)
        return StandIn(self, self.of_layer, size)

    def attribute(self, stand_in: ModuleStandIn, module: nn.Module, name: str) -> Any:
        """Return what the code reads as self.name."""
        own = vars(module)
        holder = next((own[kind] for kind in ("_modules", "_parameters", "_buffers") if name in own[kind]), own)
        value = holder.get(name)
        self.note(holder, name, value)  # if it is missing: it would be found before that of the class
        if name not in holder:
            value = inspect.getattr_static(original_class(module), name)
            if name == EXPANDS and self.expands(module):
                return partial(expand_latents, self, stand_in)
            if isinstance(value, FunctionType):
                return _method(module, MethodType(value, stand_in))
            if isinstance(value, property) and value.fget is not None:
                return value.fget(stand_in)
        if isinstance(value, PLAIN_TYPES):
            return value
        if isinstance(value, nn.Module) and holder is not own:
            return self.child(value)
        if isinstance(value, nn.Parameter) and value.ndim == 1:
            return Vector(holder, name, value)
        if isinstance(value, torch.Tensor) and holder is own["_buffers"] and (value.shape == (1,) or value.ndim == 2):
            return Vector(holder, name, value) if value.ndim == 1 else TableStandIn(value)
        if name in own and callable(getattr(value, "to_dict", None)):
            return ConfigStandIn(self, value)
        if name not in own or not callable(value) or isinstance(value, nn.Module):
            raise UntraceableError(f"it reads its own {name}")
        activation = activation_name(value, PLAIN_ACTIVATIONS)
        if activation is None:
            raise UntraceableError("its activation is not known")
        return partial(self.activate, activation)

    def child(self, module: nn.Module) -> Any:
        """Return the stand-in of a submodule."""
        if isinstance(module, nn.ModuleList):
            self.note(vars(module), "_modules", module._modules)
            self.note(module._modules, str(len(module)), None)
            for place, each in module._modules.items():
                self.note(module._modules, place, each)
            return [self.child(each) for each in module]
        if isinstance(module, nn.Linear) or is_conv1d(module):
            return LinearStandIn(self, module)
        if is_layer_norm(module):
            return lambda x: self.layer_norm(module, x)
        if seems_rms_norm(module):
            return NormStandIn(self, module)
        if isinstance(module, (nn.Dropout, nn.Identity)):
            for name in ("training", "p"):
                self.note(vars(module), name, vars(module).get(name))
            self.visit_known(module)
            if isinstance(module, nn.Dropout) and module.training and module.p > 0:
                raise UntraceableError("it drops numbers at random")
            return lambda x: x
        parts = vars(module)
        if not (parts["_modules"] or parts["_parameters"] or parts["_buffers"]):
            activation = activation_name(module, PLAIN_ACTIVATIONS)
            if activation is not None:
                self.visit(module)
                for name, value in parts.items():
                    self.note(parts, name, value)
                return lambda x: self.activate(activation, x)
        known = known_module(module)
        if known is not None:
            return partial(known[0].recorded, self, (module, known[1]))
        states = self.states_of(module)
        if states is not None:
            return partial(states.recorded, self, module)
        if self.is_called(module):
            return partial(self.call_module, module, results_of(original_class(module).forward))
        held = parts.get(FUSED)  # the parts that it had when it was given a native forward
        has_held = isinstance(held, GatedNames) and held.are_of(original_class(module).forward)
        names = held if has_held else gated_names(module)
        if names is not None:
            return lambda x: self.gated(module, names, x)
        return ModuleStandIn(self, module)

    def call_module(self, module: nn.Module, results: int | None, x: Any) -> Any:
        """Record the call of a module as it is, which returns a tensor of x's shape; with others, if in a tuple."""
        require(x, heads=False, flat=False)
        if not x.is_whole:
            raise UntraceableError("a module that is called gets a part of a tensor")
        out = self.put("module", [x], x.width, modules=(module,), results=results)
        return out if results is None else (out, *(Opaque("other") for _ in range(results - 1)))

    def run(self, stand_in: ModuleStandIn, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the code of a module's class."""
        if self._ran:
            self.visit(module)
        else:  # the layer, whose own hooks and forward are around all this
            self.note_class(module)
        self._ran = True
        kind = original_class(module)
        forward = kind.forward
        if not isinstance(forward, FunctionType):
            raise UntraceableError(f"the code of {kind.__name__} is not Python's")
        functions = dict(self._functions(forward))
        if functions:
            forward = with_functions(forward, functions)
        self.running.append(stand_in)
        try:
            return forward(stand_in, *args, **kwargs)
        finally:
            self.running.pop()

    def _functions(self, forward: FunctionType) -> Iterator[tuple[str, Callable[..., Any]]]:
        """The functions of the code's file that are recorded where it calls them: a rotation, and activations."""
        forward = without_renaming(forward)
        for name in forward.__code__.co_names:
            function = forward.__globals__.get(name)
            rotates = name in (*ROTATIONS, ROTATION_BY_COMPLEX)
            activation = None if rotates else name_of_function(function)
            if name in ROTATIONS:
                yield name, partial(self.rotate, function)
            elif rotates and function is not None:
                yield name, partial(rotate_by_complex, self, function)
            elif activation is not None:
                self.note(forward.__globals__, name, function)
                yield name, partial(self.activate, activation)


def _method(module: nn.Module, bound: MethodType) -> Callable[..., Any]:
    """Return a method that is Computed if it is given numbers of tokens and plain values alone."""

    @wraps(bound)  # whose signature the code may ask for
    def method(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        others = [each for each in given if each is not TOKENS and each is not TOKENS_BEFORE]
        plain = all(isinstance(each, (*PLAIN_TYPES, torch.device)) for each in others)
        if plain and any(each is TOKENS for each in given):
            return Computed(module, bound.__func__, args, kwargs)
        return bound(*args, **kwargs)

    return method
