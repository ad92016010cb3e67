"""The trace of an encoder layer, and of the encoder that calls such layers one after the other.

An encoder layer sees all tokens of a sequence at once, and keeps nothing in a cache.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from .operation import INPUT, OUTPUT, Operation, Span, UntraceableError
from .scores import Scores
from .stand_ins import BATCH, PLAIN_TYPES, TOKENS, CacheStandIn, Computed, ModuleStandIn, Opaque, StandIn
from .trace import Trace
from .trial import PLAIN_ACTIVATIONS, activation_name

MASK, TABLES, BIAS, CACHE = "attention_mask", "position_embeddings", "position_bias", "past_key_values"
PASSED_ON = (MASK, "position_ids", TABLES, BIAS, CACHE)  # tensors, and a cache, that a layer may only pass on


@dataclass(frozen=True)
class CallForm:
    """The arguments of a call, apart from the numbers in tensors.

    states: the name of the hidden states. tensors: those of PASSED_ON that are tensors. plain: the name, type and
    value of each other argument; True is not 1. table_dtype: of cos and sin, if they are given.
    """

    states: str
    tensors: frozenset[str] = frozenset()
    plain: tuple[tuple[str, type, Any], ...] = ()
    table_dtype: torch.dtype | None = None


def usual_form(kind: type[nn.Module], dtype: torch.dtype = torch.float32) -> CallForm:
    """Return the form of a call with hidden states, and with a mask, a bias of positions, and cos and sin of `dtype`,
    if the code takes them.
    """
    names = parameter_names(kind.forward)
    if not names:
        raise UntraceableError("it takes no hidden states")
    tensors = frozenset({MASK, TABLES, BIAS}.intersection(names))
    return CallForm(names[0], tensors, table_dtype=dtype if TABLES in tensors else None)


def argument(kind: type[nn.Module], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument of this name of a call that is `bound`; None if it has none."""
    return dict(zip(parameter_names(kind.forward), args, strict=False)).get(name, kwargs.get(name))


def bound(kind: type[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, CallForm] | None:
    """Return the hidden states, the mask (or None) and the form of a call; None for one that is not known.

    kind: the class whose forward is called.
    """
    names = parameter_names(kind.forward)
    named = dict(zip(names, args, strict=False))
    if not names or len(args) > len(names) or not named.keys().isdisjoint(kwargs):
        return None
    named.update(kwargs)
    x, mask = named.pop(names[0], None), named.get(MASK)
    tensors = frozenset(name for name in PASSED_ON if not isinstance(named.get(name), PLAIN_TYPES))
    plain = tuple((name, type(value), value) for name, value in named.items() if name not in tensors)
    if not all(issubclass(kind, PLAIN_TYPES) or _is_size(value) for _, kind, value in plain):
        return None
    table_dtype = None
    if TABLES in tensors:
        tables = named[TABLES]
        if type(tables) is not tuple or list(map(type, tables)) != [torch.Tensor] * 2:
            return None
        table_dtype = tables[0].dtype
    return x, mask, CallForm(names[0], tensors, plain, table_dtype)


def _is_size(value: object) -> bool:
    """Return whether a value is a tuple of integers, as the height and width of an image."""
    if not isinstance(value, tuple) or type(value) not in (tuple, torch.Size):
        return False
    return all(type(each) is int for each in value)


@lru_cache(maxsize=256)
def parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters that can be given by place, without self."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, eq=False)
class Vector:
    """A parameter [width] by which the code may multiply the columns of a tensor. owner, name: where it was read."""

    owner: Mapping[str, Any]
    name: str
    parameter: nn.Parameter

    def __mul__(self, other: Any) -> Any:
        return other * self

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it reads {self.name}.{name}")


class LinearStandIn:
    """A linear layer, of which the code may ask whether its weight has the dtype of the numbers."""

    def __init__(self, trace: Trace, module: nn.Linear) -> None:
        self._trace, self._module = trace, module

    def __call__(self, x: Any) -> StandIn:
        return self._trace.linear(self._module, x)

    @property
    def weight(self) -> Opaque:
        parameters = self._module._parameters
        weight = parameters.get("weight")
        self._trace.note(parameters, "weight", weight)
        if weight is not None and weight.dtype is not self._trace.dtype:
            raise UntraceableError("a linear layer has another dtype than its input")
        return Opaque("weight")


class EncoderTrace(Trace):
    """One run of the code of an encoder layer, or of an encoder.

    others: what the code returns in a tuple with its result, each None or BIAS; None if it returns a tensor alone.
    """

    def __init__(self, dtype: torch.dtype, attention: str | None = None) -> None:
        super().__init__(dtype, attention)
        self.others: tuple[str | None, ...] | None = None
        self.device = torch.device("cpu")

    def encoder_layer(self, layer: nn.Module, width: int, form: CallForm) -> None:
        """Run the forward of a layer on [B, T, width]. Raises UntraceableError."""
        result = self.call(layer, width, form)
        if isinstance(result, tuple) and result and all(each is None or each is self.bias for each in result[1:]):
            self.others, result = tuple(None if each is None else BIAS for each in result[1:]), result[0]
        last = self.operations[-1] if self.operations else None
        if last is None or sum(operation.kind == "attend" for operation in self.operations) != 1:
            raise UntraceableError("it does not attend once")
        written = {INPUT, *(span.buffer for operation in self.operations for span in operation.outputs)}
        if not written.issuperset(span.buffer for operation in self.operations for span in operation.inputs):
            raise UntraceableError("it reads an activation again that it multiplied")
        if any(span.head for operation in self.operations for span in operation.inputs):
            raise UntraceableError("it takes parts of heads")
        whole = isinstance(result, StandIn) and result.shape == (BATCH, TOKENS, width) and result.factor == 1
        if not whole or [result.span] != last.outputs or last.kind not in ("add", "layer_norm"):
            raise UntraceableError("it returns something else than its last sum or norm")
        self.operations = folded(self.operations)
        self.operations[-1].outputs[0] = Span(OUTPUT, 0, width)

    def call(self, module: nn.Module, width: int, form: CallForm) -> Any:
        """Return the result of a module's code on hidden states [B, T, width]."""
        self.widths[INPUT] = self.widths[OUTPUT] = width
        tensors: dict[str, Any] = {name: Opaque(name) for name in form.tensors}
        tensors |= {MASK: self.mask, TABLES: self.tables, BIAS: self.bias, CACHE: CacheStandIn(self)}
        kwargs = {name: value for name, _, value in form.plain} | {name: tensors[name] for name in form.tensors}
        kwargs[form.states] = StandIn(self, Span(INPUT, 0, width), width)
        try:
            return self.run(ModuleStandIn(self, module), module, (), kwargs)
        except UntraceableError:
            raise
        except Exception as error:  # the code fails on a stand-in with an error of its own
            raise UntraceableError(f"its code fails on a stand-in ({type(error).__name__}: {error})") from error

    def attribute(self, stand_in: ModuleStandIn, module: nn.Module, name: str) -> Any:
        value = vars(module).get(name)
        if callable(value) and not isinstance(value, nn.Module) and not callable(getattr(value, "to_dict", None)):
            self.note(vars(module), name, value)
            return self._activation(value)
        parameters = vars(module)["_parameters"]
        value = parameters.get(name)
        if isinstance(value, nn.Parameter) and value.ndim == 1:
            self.note(parameters, name, value)
            return Vector(parameters, name, value)
        value = super().attribute(stand_in, module, name)
        if isinstance(value, MethodType) and value.__self__ is stand_in:

            @wraps(value)  # whose signature the code may ask for
            def method(*args: Any, **kwargs: Any) -> Any:
                return self._method(module, value, args, kwargs)

            return method
        return value

    @staticmethod
    def _method(module: nn.Module, method: MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a method returns; Computed if it is given the number of tokens and plain values alone."""
        given = [*args, *kwargs.values()]
        plain = all(each is TOKENS or isinstance(each, (*PLAIN_TYPES, torch.device)) for each in given)
        if plain and any(each is TOKENS for each in given):
            return Computed(module, method.__func__, args, kwargs)
        return method(*args, **kwargs)

    def child(self, module: nn.Module) -> Any:
        if isinstance(module, nn.ModuleList):
            self.note(vars(module), "_modules", module._modules)
            self.note(module._modules, str(len(module)), None)
            for place, each in module._modules.items():
                self.note(module._modules, place, each)
            return [self.child(each) for each in module]
        if isinstance(module, nn.Linear):
            return LinearStandIn(self, module)
        return super().child(module)

    def _activation(self, function: Any) -> Callable[[Any], StandIn]:
        name = activation_name(function, PLAIN_ACTIVATIONS)
        if name is None:
            raise UntraceableError("its activation is not known")
        return lambda x: self.activate(name, x)

    # -- operations ------------------------------------------------------------------------------------

    def multiply(self, x: StandIn, other: Any) -> StandIn:
        if isinstance(other, StandIn):
            return self.gate(x, other)
        if not isinstance(other, Vector):
            return super().multiply(x, other)
        self._require(x, heads=False, flat=False)
        if other.parameter.shape != (x.width,) or other.parameter.dtype is not self.dtype:
            raise UntraceableError("it multiplies by a parameter of another size or dtype")
        out = self.buffer(x.width)
        self.operations.append(Operation("scale", [x.span], [out], values={"vector": other}))
        return StandIn(self, out, x.width)

    def gate(self, x: StandIn, y: StandIn) -> StandIn:
        """Record act(x) * y, in either order, as one operation in place of the activation."""
        place, other = next(
            ((i, b) for a, b in ((x, y), (y, x)) for i, operation in enumerate(self.operations)
             if operation.kind == "activation" and operation.outputs == [a.span]), (None, None),
        )  # fmt: skip
        for each in (x, y):
            self._require(each, heads=False, flat=False)
        if place is None or other is None or x.width != y.width or x.span == y.span:
            raise UntraceableError("it multiplies two tensors of which none is an activation")
        activation, out = self.operations.pop(place), self.buffer(x.width)
        values = activation.values | {"dim": x.width}
        self.operations.append(Operation("gate", [*activation.inputs, other.span], [out], values=values))
        return StandIn(self, out, x.width)

    def attend(self, module: Any, qkv: tuple[Any, Any, Any], mask: Any, options: dict[str, Any]) -> StandIn:
        given = {name: value for name, value in options.items() if name != BIAS}
        bias = options.get(BIAS)
        if isinstance(bias, Computed):
            self.bias = bias
        if not isinstance(module, ModuleStandIn) or mask not in (None, self.mask) or bias not in (None, self.bias):
            raise UntraceableError("it attends in a way of its own")
        values = {"options": given, "masked": mask is not None, "biased": bias is not None, "adds_mask": False}
        return self._attend(qkv, (module._module,), values)

    def attend_by(self, scores: Scores, value: Any) -> StandIn:
        if self.layer_idx is not None:
            raise UntraceableError("it computes the scores of a cache by itself")
        values = {
            "options": {"scaling": scores.factor, "is_causal": False}, "masked": scores.is_masked,
            "biased": scores.is_biased, "adds_mask": True,
        }  # fmt: skip
        return replace(self._attend((scores.query, scores.key, value), (), values), transposed=True)

    def _attend(self, qkv: tuple[Any, Any, Any], modules: tuple[nn.Module, ...], values: dict[str, Any]) -> StandIn:
        query, key, value = qkv
        factor = getattr(query, "factor", 1.0)  # of queries that are scaled ahead of the scores
        for x in (replace(query, factor=1.0) if factor != 1 else query, key, value):
            self._require(x, heads=True)
        dims = {x.shape[3] for x in qkv}
        same = key.heads == value.heads and query.heads % key.heads == 0 and len(dims) == 1
        if not same or not key.cached is value.cached is (self.layer_idx is not None):
            raise UntraceableError("it attends in a way of its own")
        out = self.buffer(query.width)
        values["own_bias"] = self.bias if values["biased"] and isinstance(self.bias, Computed) else None
        values |= {"heads": query.heads, "kv_heads": key.heads, "dim": query.shape[3], "factor": factor}
        self.operations.append(Operation("attend", [x.span for x in qkv], [out], modules, values))
        return StandIn(self, out, query.width, heads=query.heads)


def folded(operations: Sequence[Operation]) -> list[Operation]:
    """Let each product end with the activation of its result, each norm begin with the sum that it normalizes, and
    each sum with the scales of the columns that it adds.
    """
    readers = Counter(span.buffer for operation in operations for span in operation.inputs)
    done: list[Operation] = []
    for operation in operations:
        last = done[-1] if done and operation.inputs == done[-1].outputs else None
        read = 0 if last is None else readers[last.outputs[0].buffer]
        if operation.kind == "activation":
            if last is None or last.kind != "linear" or read > 1:
                raise UntraceableError("an activation follows no product")
            done[-1] = replace(last, outputs=operation.outputs, values=last.values | operation.values)
        elif operation.kind == "add" and done and done[-1].kind == "scale":
            done[-1] = _scaled_sum(operation, done[-1], readers)
        elif last is not None and (operation.kind, last.kind) == ("layer_norm", "add") and _is_plain(last):
            kept = last.outputs if read > 1 else []
            done[-1] = replace(operation, inputs=last.inputs, outputs=[*operation.outputs, *kept])
        else:
            done.append(replace(operation, outputs=list(operation.outputs)))
    return done


def _is_plain(operation: Operation) -> bool:
    """Return whether a sum is that of two tensors as they are."""
    return bool(operation.values["factor"] == 1) and "vector" not in operation.values


def _scaled_sum(operation: Operation, scale: Operation, readers: Mapping[int, int]) -> Operation:
    """Return a sum whose second term is what `scale` multiplies."""
    others = [span for span in operation.inputs if span != scale.outputs[0]]
    if len(others) != 1 or readers[scale.outputs[0].buffer] > 1 or not _is_plain(operation):
        raise UntraceableError("scaled columns are not added once")
    return replace(operation, inputs=[*others, *scale.inputs], values=operation.values | scale.values)
