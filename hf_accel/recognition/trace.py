"""The trace of a layer: its operations, found by running its code once with stand-ins for tensors and modules.

A stand-in knows only what is written here. Whatever else the code asks of it raises UntraceableError: nothing is
guessed, and the layer keeps its own forward. All that the code reads (attributes, submodules) is noted, so that a
later change is noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..undo.journal import original_class
from ..undo.state import FUSED
from .code import ROTATION, with_rotation
from .operation import INPUT, OUTPUT, Operation, Span, UntraceableError
from .scores import Scores
from .stand_ins import (
    BATCH,
    PLAIN_TYPES,
    TOKENS,
    CacheStandIn,
    ConfigStandIn,
    ModuleStandIn,
    Opaque,
    StandIn,
)
from .trial import PLAIN_ACTIVATIONS, GatedNames, activation_name, gated_names, seems_rms_norm
from .unchanged import HOOKS, Read, has_own_forward

# The arguments of a layer for which stand-ins are given where the call has any; others must be plain values.
CACHES = ("past_key_values", "layer_past")  # the names of the cache among them
TENSORS = ("attention_mask", "position_ids", "position_embeddings", *CACHES)


class Trace:
    """One run of a layer's code.

    operations: what it computed. reads: what it depends on. hooks: those of the modules that it called; usually none.
    dtype: of the tensors. attention: the name of the attention function that the model will have; None for its own.
    table_size: the numbers of cos of a token, which may be fewer than those of a head; None for as many.
    """

    def __init__(self, dtype: torch.dtype, attention: str | None = None, *, table_size: int | None = None) -> None:
        self.attention, self.dtype, self.table_size = attention, dtype, table_size
        self.equals: dict[str, str] = {}  # names of attention functions that compute what another does
        self.operations: list[Operation] = []
        self.reads: list[Read] = []
        self.hooks: list[Mapping[Any, Any]] = []
        self.ran = False  # whether the layer's own code has begun
        self.widths = [0, 0]  # of the buffers; the first two are the layer's input and output
        self.mask, self.tables = Opaque("attention_mask"), (Opaque("cos"), Opaque("sin"))
        self.bias: Opaque = Opaque("position_bias")
        self.device: torch.device | None = None  # of the tensors, where the code may ask for it
        self.layer_idx: int | None = None
        self.returns_tuple = False

    def layer(self, layer: nn.Module, width: int, **arguments: Any) -> None:
        """Run the forward of a layer on [B, T, width]. Raises UntraceableError.

        arguments: of the call, by name. The names in TENSORS get stand-ins, if they are not None; others are plain
        values, which the code may read.
        """
        self.widths[INPUT] = self.widths[OUTPUT] = width
        cache = CacheStandIn(self)
        stand_ins = (self.mask, Opaque("position_ids"), self.tables, *[cache] * len(CACHES))
        given = {n: new for n, new in zip(TENSORS, stand_ins, strict=True) if arguments.get(n) is not None}
        x = StandIn(self, Span(INPUT, 0, width), width)
        try:
            result = self.run(ModuleStandIn(self, layer), layer, (x,), arguments | given)
        except Exception as error:
            if isinstance(error, UntraceableError):
                raise
            raise UntraceableError(f"its code fails on a stand-in ({type(error).__name__}: {error})") from error
        self.returns_tuple = isinstance(result, tuple) and len(result) == 1
        self._finish(result[0] if self.returns_tuple else result)

    def _finish(self, result: Any) -> None:
        """Let the last operation write to the layer's output."""
        last = self.operations[-1] if self.operations else None
        kinds = {operation.kind for operation in self.operations}
        if last is None or not {"write", "attend"} <= kinds:
            raise UntraceableError("it does not attend over the cache")
        is_last = isinstance(result, StandIn) and result.factor == 1 and [result.span] == last.outputs
        is_last = is_last and last.kind in ("add", "layer_norm")
        if not is_last or result.shape != (BATCH, TOKENS, self.widths[OUTPUT]):
            raise UntraceableError("it returns something else than its last sum or norm")
        last.outputs = [Span(OUTPUT, 0, self.widths[OUTPUT])]

    def note(self, owner: Mapping[str, Any], name: str, value: Any) -> None:
        self.reads.append(Read(owner, name, value))

    # -- modules ---------------------------------------------------------------------------------------

    def visit(self, module: nn.Module) -> None:
        """Note the hooks around a call of the module. Raises UntraceableError if its forward was replaced."""
        own = vars(module)
        for name in ("forward", *HOOKS):
            self.note(own, name, own.get(name))
        self.hooks += [own[name] for name in HOOKS]
        if has_own_forward(module):
            raise UntraceableError("the forward of a module was replaced on the module itself")

    def attribute(self, stand_in: ModuleStandIn, module: nn.Module, name: str) -> Any:
        """Return what the code reads as self.name."""
        own = vars(module)
        holder = next((own[kind] for kind in ("_modules", "_parameters", "_buffers") if name in own[kind]), own)
        value = holder.get(name)
        self.note(holder, name, value)  # if it is missing: it would be found before that of the class
        if name not in holder:
            value = inspect.getattr_static(original_class(module), name)
            if isinstance(value, FunctionType):
                return MethodType(value, stand_in)
            if isinstance(value, property) and value.fget is not None:
                return value.fget(stand_in)
        if isinstance(value, PLAIN_TYPES):
            return value
        if isinstance(value, nn.Module) and holder is not own:
            return self.child(value)
        if name in own and callable(getattr(value, "to_dict", None)):
            return ConfigStandIn(self, value)
        raise UntraceableError(f"it reads its own {name}")

    def child(self, module: nn.Module) -> Callable[..., Any]:
        """Return the stand-in of a submodule."""
        if isinstance(module, nn.Linear) or is_conv1d(module):
            return lambda x: self.linear(module, x)
        if type(module) is nn.LayerNorm:
            return lambda x: self.layer_norm(module, x)
        if seems_rms_norm(module):
            return lambda x: self.norm(module, x)
        if isinstance(module, (nn.Dropout, nn.Identity)):
            for name in ("training", "p"):
                self.note(vars(module), name, vars(module).get(name))
            self.visit(module)
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
        held = parts.get(FUSED)  # the parts that it had when it was given a native forward
        names = held if isinstance(held, GatedNames) else gated_names(module)
        if names is not None:
            return lambda x: self.gated(module, names, x)
        return ModuleStandIn(self, module)

    def run(self, stand_in: ModuleStandIn, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the code of a module's class."""
        if self.ran:
            self.visit(module)
        self.ran = True  # the layer, whose own hooks and forward are around all this
        kind = original_class(module)
        forward = kind.forward
        if not isinstance(forward, FunctionType):
            raise UntraceableError(f"the code of {kind.__name__} is not Python's")
        if ROTATION in forward.__code__.co_names:
            original = forward.__globals__[ROTATION]
            forward = with_rotation(forward, lambda *given, **named: self.rotate(original, *given, **named))
        return forward(stand_in, *args, **kwargs)

    # -- operations ------------------------------------------------------------------------------------

    def buffer(self, width: int) -> Span:
        self.widths.append(width)
        return Span(len(self.widths) - 1, 0, width)

    def linear(self, module: nn.Module, x: Any) -> StandIn:
        self._require(x, heads=False)
        names = ("in_features", "out_features") if isinstance(module, nn.Linear) else ("nx", "nf")
        inputs, outputs = (vars(module)[name] for name in names)
        if x.width != inputs:
            raise UntraceableError("a linear layer takes another number of inputs")
        self.visit(module)
        out = self.buffer(outputs)
        self.operations.append(Operation("linear", [x.span], [out], (module,)))
        return self._like(x, out, outputs)

    def activate(self, name: str, x: Any) -> StandIn:
        self._require(x, heads=False)
        out = self.buffer(x.width)
        self.operations.append(Operation("activation", [x.span], [out], values={"activation": name}))
        return self._like(x, out, x.width)

    def layer_norm(self, module: nn.LayerNorm, x: Any) -> StandIn:
        self._require(x, heads=False)
        if module.normalized_shape != (x.width,):
            raise UntraceableError("a norm takes another number of inputs")
        self.visit(module)
        for name in ("eps", "normalized_shape", "elementwise_affine"):
            self.note(vars(module), name, vars(module).get(name))
        out = self.buffer(x.width)
        self.operations.append(Operation("layer_norm", [x.span], [out], (module,), {"dim": x.width}))
        return self._like(x, out, x.width)

    def gated(self, module: nn.Module, names: GatedNames, x: Any) -> StandIn:
        """Record down(act(gate(x)) * up(x)), where the product is one operation."""
        self._require(x, heads=False, flat=False)
        parts = vars(module)["_modules"]
        gate, up, down = (parts[name] for name in (names.gate, names.up, names.down))
        for each in (module, gate, up):
            self.visit(each)
        for name in (names.gate, names.up, names.down):
            self.note(parts, name, parts[name])
        if names.activation is not None:
            name, tried = names.activation
            holder = parts if isinstance(tried, nn.Module) else vars(module)
            self.note(holder, name, holder.get(name))
            if isinstance(tried, nn.Module):
                self.visit(tried)
            if holder.get(name) is not tried:
                raise UntraceableError("the activation of its MLP is not the one that was tried")
        out = self.buffer(gate.out_features)
        self.operations.append(Operation("gated", [x.span], [out], (gate, up), {"epilogue": names.epilogue}))
        return self.linear(down, StandIn(self, out, gate.out_features))

    def norm(self, module: nn.Module, x: Any) -> StandIn:
        weight = module._parameters.get("weight")
        self.note(module._parameters, "weight", weight)
        if not isinstance(x, StandIn) or x.factor != 1 or x.flat or x.span.head or weight is None:
            raise UntraceableError("a norm takes something else than numbers of tokens")
        if x.shape[-1] != weight.shape[0]:
            raise UntraceableError("a norm takes another number of inputs")
        self.visit(module)
        out = self.buffer(x.width)
        values = {"heads": x.heads or 1, "dim": weight.shape[0]}
        self.operations.append(Operation("norm", [x.span], [out], (module,), values))
        return StandIn(self, out, x.width, heads=x.heads, transposed=x.transposed)

    def rotate(self, original: Any, *args: Any, **kwargs: Any) -> tuple[StandIn, StandIn]:
        if len(args) != 4 or not _as_usual(original, kwargs) or (args[2], args[3]) != self.tables:
            raise UntraceableError("it rotates in a way of its own")
        q, k = args[:2]
        for x in (q, k):
            self._require(x, heads=True)
        if q.shape[3] != k.shape[3]:
            raise UntraceableError("queries and keys have heads of different sizes")
        if q.cached or k.cached:
            raise UntraceableError("it rotates what comes from the cache")
        size, dim = self.table_size or q.shape[3], q.shape[3]
        if size > dim:
            raise UntraceableError("its cos and sin have more numbers than a head")
        rotated = [x if size == dim else x[..., :size] for x in (q, k)]
        outs = [self.buffer(x.width) for x in rotated]
        values = {
            "function": original, "heads": q.heads, "kv_heads": k.heads, "dim": size, "partial": size < dim,
        }  # fmt: skip
        self.operations.append(Operation("rope", [x.span for x in rotated], outs, values=values))
        q_out, k_out = (replace(x, span=out) for x, out in zip(rotated, outs, strict=True))
        if size == dim:
            return q_out, k_out
        return self.join(q_out, q[..., size:]), self.join(k_out, k[..., size:])

    def join(self, x: Any, y: Any) -> StandIn:
        """Record that the numbers of each head of y follow those of x."""
        for each in (x, y):
            self._require(each, heads=True)
        if x.heads != y.heads or x.cached or y.cached or not (x.width and y.width):
            raise UntraceableError("it joins something else than parts of heads")
        out = self.buffer(x.width + y.width)
        values = {"heads": x.heads, "dim": x.shape[3], "value_dim": y.shape[3]}
        self.operations.append(Operation("join", [x.span, y.span], [out], values=values))
        return self._like(x, out, x.width + y.width)

    def write(self, key: Any, value: Any, layer_idx: Any) -> tuple[StandIn, StandIn]:
        self._require(key, heads=True)
        self._require(value, heads=True)
        if self.layer_idx is not None or type(layer_idx) is not int or key.heads != value.heads:
            raise UntraceableError("it writes to the cache in a way of its own")
        self.layer_idx = layer_idx
        values = {"heads": key.heads, "dim": key.shape[3], "value_dim": value.shape[3]}
        self.operations.append(Operation("write", [key.span, value.span], [], values=values))
        return replace(key, cached=True), replace(value, cached=True)

    def attend(self, module: Any, qkv: tuple[Any, Any, Any], mask: Any, options: dict[str, Any]) -> StandIn:
        query, key, value = qkv
        factor = getattr(query, "factor", 1.0)  # of queries that are scaled ahead of the scores
        for x in (replace(query, factor=1.0) if factor != 1 else query, key, value):
            self._require(x, heads=True)
        same = query.shape[3] == key.shape[3] and query.heads % key.heads == 0
        cached = key.cached and value.cached
        if not (same and cached and isinstance(module, ModuleStandIn) and mask in (None, self.mask)):
            raise UntraceableError("it attends in a way of its own")
        out = self.buffer(query.heads * value.shape[3])
        values = {
            "options": options, "heads": query.heads, "kv_heads": key.heads, "dim": key.shape[3],
            "value_dim": value.shape[3], "factor": factor,
        }  # fmt: skip
        self.operations.append(Operation("attend", [query.span], [out], (module._module,), values))
        return StandIn(self, out, query.heads * value.shape[3], heads=query.heads)

    def attend_by(self, scores: Scores, value: Any) -> StandIn:
        raise UntraceableError("it computes attention by itself")

    def add(self, x: Any, y: Any) -> StandIn:
        same = isinstance(x, StandIn) and isinstance(y, StandIn) and x.width == y.width
        if same and x.factor != 1:
            x, y = y, x
        if not same or x.factor != 1 or x.flat is not y.flat or not (x.is_whole and y.is_whole):
            raise UntraceableError("it adds something else than two tensors of one shape")
        out = self.buffer(x.width)
        self.operations.append(Operation("add", [x.span, y.span], [out], values={"dim": x.width, "factor": y.factor}))
        return self._like(x, out, x.width)

    def multiply(self, x: StandIn, other: Any) -> StandIn:
        """Multiply by something else than a number."""
        raise UntraceableError("it multiplies by more than a number")

    @staticmethod
    def _like(x: StandIn, span: Span, width: int) -> StandIn:
        """Return a tensor of the form of x."""
        return replace(x, span=span, width=width)

    @staticmethod
    def _require(x: Any, *, heads: bool, flat: bool = True) -> None:
        """Check the form of x. heads: whether it must be [B, heads, T, dim], else [B, T, width]. flat: whether [B * T,
        width] will do as well.
        """
        known = isinstance(x, StandIn) and x.factor == 1 and (flat or not x.flat)
        if not known or x.transposed is not heads or (x.heads is not None) is not heads:
            raise UntraceableError("its tensors have another layout")


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module has the name and the sizes of transformers' Conv1D."""
    own: dict[str, Any] = vars(module)
    weight = own["_parameters"].get("weight")
    return type(module).__name__ == "Conv1D" and weight is not None and weight.shape == (own.get("nx"), own.get("nf"))


def _as_usual(rotation: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a rotation would do the same without these arguments, because they have their usual values."""
    if not kwargs:
        return True
    usual = inspect.signature(rotation).parameters
    known = all(isinstance(value, PLAIN_TYPES) and name in usual for name, value in kwargs.items())
    return known and all(usual[name].default == value for name, value in kwargs.items())
