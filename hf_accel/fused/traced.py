"""The trace of a decoder layer: its operations, found by running its code once with stand-ins for tensors and modules.

If the code does something that the stand-ins do not know, the layer keeps its own forward. All that the code reads
(attributes, submodules) is noted, so that a later change is noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import nn

from ..kernels.cpu.decoder_layer import INPUT, OUTPUT
from ..recognition.stand_ins import (
    BATCH,
    PLAIN_TYPES,
    TENSORS,
    TOKENS,
    CacheStandIn,
    ConfigStandIn,
    ModuleStandIn,
    Opaque,
    Span,
    StandIn,
    UntraceableError,
)
from ..recognition.unchanged import HOOKS, Read, has_own_forward
from ..undo.state import FUSED
from .forms import ROTATION, GatedNames, gated_names, with_rotation

Kind = Literal["linear", "gated", "norm", "rope", "write", "attend", "add", "layer_norm", "activation"]


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


class Trace:
    """One run of a layer's code.

    operations: what it computed. reads: what it depends on. hooks: those of the modules that it called; usually none.
    dtype: of the tensors. attention: the name of the attention function that the model will have; None for its own.
    """

    def __init__(self, dtype: torch.dtype, float_rows: int, attention: str | None = None) -> None:
        self.attention, self.dtype, self.float_rows = attention, dtype, float_rows
        self.operations: list[Operation] = []
        self.reads: list[Read] = []
        self.hooks: list[Mapping[Any, Any]] = []
        self.ran = False  # whether the layer's own code has begun
        self.widths = [0, 0]  # of the buffers; the first two are the layer's input and output
        self.mask, self.tables = Opaque("attention_mask"), (Opaque("cos"), Opaque("sin"))
        self.layer_idx: int | None = None
        self.returns_tuple = False

    def layer(self, layer: nn.Module, width: int, **arguments: Any) -> None:
        """Run the forward of a layer on [B, T, width]. Raises UntraceableError.

        arguments: of the call, by name. The names in TENSORS get stand-ins, if they are not None; others are plain
        values, which the code may read.
        """
        self.widths[INPUT] = self.widths[OUTPUT] = width
        stand_ins = (self.mask, Opaque("position_ids"), CacheStandIn(self), self.tables)
        given = {n: new for n, new in zip(TENSORS, stand_ins, strict=True) if arguments.get(n) is not None}
        kwargs = arguments | given
        x = StandIn(self, Span(INPUT, 0, width), width)
        try:
            result = self.run(ModuleStandIn(self, layer), layer, (x,), kwargs)
        except UntraceableError:
            raise
        except Exception as error:  # the code fails on a stand-in with an error of its own
            raise UntraceableError(f"its code fails on a stand-in ({type(error).__name__}: {error})") from error
        self.returns_tuple = isinstance(result, tuple) and len(result) == 1
        self._finish(result[0] if self.returns_tuple else result)

    def _finish(self, result: Any) -> None:
        """Let the last operation write to the layer's output."""
        last = self.operations[-1] if self.operations else None
        kinds = {operation.kind for operation in self.operations}
        if last is None or not {"write", "attend"} <= kinds:
            raise UntraceableError("it does not attend over the cache")
        if not isinstance(result, StandIn) or result.factor != 1 or [result.span] != last.outputs:
            raise UntraceableError("it returns something else than the last sum")
        if result.shape != (BATCH, TOKENS, self.widths[OUTPUT]) or last.kind != "add":
            raise UntraceableError("it returns something else than the last sum")
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
        for kind in ("_modules", "_parameters", "_buffers"):
            if name in own[kind]:
                value = own[kind][name]
                self.note(own[kind], name, value)
                if value is None:
                    return None
                if kind == "_modules":
                    return self.child(value)
                raise UntraceableError(f"it computes with its own {name}")
        if name in own:
            value = own[name]
            self.note(own, name, value)
            if isinstance(value, PLAIN_TYPES):
                return value
            if callable(getattr(value, "to_dict", None)):
                return ConfigStandIn(self, value)
            raise UntraceableError(f"it reads its own {name}")
        self.note(own, name, None)  # an attribute of the module would be found before that of its class
        value = inspect.getattr_static(original_class(module), name)
        if isinstance(value, FunctionType):
            return MethodType(value, stand_in)
        if isinstance(value, property) and value.fget is not None:
            return value.fget(stand_in)
        if isinstance(value, PLAIN_TYPES):
            return value
        raise UntraceableError(f"it reads its own {name}")

    def child(self, module: nn.Module) -> Callable[..., Any]:
        """Return the stand-in of a submodule."""
        if isinstance(module, nn.Linear):
            return lambda x: self.linear(module, x)
        if type(module).__name__.endswith("RMSNorm"):
            return lambda x: self.norm(module, x)
        if isinstance(module, (nn.Dropout, nn.Identity)):
            for name in ("training", "p"):
                self.note(vars(module), name, vars(module).get(name))
            self.visit(module)
            if isinstance(module, nn.Dropout) and module.training and module.p > 0:
                raise UntraceableError("it drops numbers at random")
            return lambda x: x
        names = gated_names_of(module, self.float_rows)
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

    def linear(self, module: nn.Linear, x: Any) -> StandIn:
        self._require(x, heads=False)
        if x.width != module.in_features:
            raise UntraceableError("a linear layer takes another number of inputs")
        self.visit(module)
        out = self.buffer(module.out_features)
        self.operations.append(Operation("linear", [x.span], [out], (module,)))
        return StandIn(self, out, module.out_features)

    def gated(self, module: nn.Module, names: GatedNames, x: Any) -> StandIn:
        """Record down(act(gate(x)) * up(x)), where the product is one operation."""
        self._require(x, heads=False)
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
        self.operations.append(Operation("gated", [x.span], [out], (gate, up), {"epilogue": names.call.epilogue}))
        return self.linear(down, StandIn(self, out, gate.out_features))

    def norm(self, module: nn.Module, x: Any) -> StandIn:
        weight = module._parameters.get("weight")
        self.note(module._parameters, "weight", weight)
        if not isinstance(x, StandIn) or x.factor != 1 or weight is None:
            raise UntraceableError("a norm takes something else than numbers of tokens")
        if x.shape[-1] != weight.shape[0]:
            raise UntraceableError("a norm takes another number of inputs")
        self.visit(module)
        out = self.buffer(x.width)
        values = {"heads": x.heads or 1, "dim": weight.shape[0]}
        self.operations.append(Operation("norm", [x.span], [out], (module,), values))
        return StandIn(self, out, x.width, heads=x.heads, transposed=x.transposed)

    def rotate(self, original: Any, *args: Any, **kwargs: Any) -> tuple[StandIn, StandIn]:
        if len(args) != 4 or kwargs or (args[2], args[3]) != self.tables:
            raise UntraceableError("it rotates in a way of its own")
        q, k = args[:2]
        for x in (q, k):
            self._require(x, heads=True)
        if q.shape[3] != k.shape[3]:
            raise UntraceableError("queries and keys have heads of different sizes")
        outs = [self.buffer(x.width) for x in (q, k)]
        values = {"function": original, "heads": q.heads, "kv_heads": k.heads, "dim": q.shape[3]}
        self.operations.append(Operation("rope", [q.span, k.span], outs, values=values))
        return replace(q, span=outs[0]), replace(k, span=outs[1])

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
        for x in qkv:
            self._require(x, heads=True)
        query, key, value = qkv
        if not isinstance(module, ModuleStandIn) or not (key.cached and value.cached) or mask not in (None, self.mask):
            raise UntraceableError("it attends in a way of its own")
        if query.shape[3] != key.shape[3] or query.heads % key.heads:
            raise UntraceableError("it attends in a way of its own")
        out = self.buffer(query.heads * value.shape[3])
        values = {
            "options": options, "heads": query.heads, "kv_heads": key.heads, "dim": key.shape[3],
            "value_dim": value.shape[3],
        }  # fmt: skip
        self.operations.append(Operation("attend", [query.span], [out], (module._module,), values))
        return StandIn(self, out, query.heads * value.shape[3], heads=query.heads)

    def add(self, x: Any, y: Any) -> StandIn:
        if not (isinstance(x, StandIn) and isinstance(y, StandIn)) or x.width != y.width:
            raise UntraceableError("it adds something else than two tensors of one shape")
        if x.factor != 1:
            x, y = y, x
        whole = all(z.span.offset == 0 and z.span.stride == z.width and z.heads is None for z in (x, y))
        if x.factor != 1 or not whole:
            raise UntraceableError("it adds something else than two tensors of one shape")
        out = self.buffer(x.width)
        self.operations.append(Operation("add", [x.span, y.span], [out], values={"dim": x.width, "factor": y.factor}))
        return StandIn(self, out, x.width)

    @staticmethod
    def _require(x: Any, *, heads: bool) -> None:
        """Check the form of x. heads: whether x must be [B, heads, T, dim], else [B, T, width]."""
        if (
            not isinstance(x, StandIn)
            or x.transposed is not heads
            or (x.heads is not None) is not heads
            or x.factor != 1
        ):
            raise UntraceableError("its tensors have another layout")


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before a native forward was mixed in."""
    kind: type[nn.Module] = getattr(type(module), "original_class", type(module))
    return kind


def gated_names_of(module: nn.Module, float_rows: int) -> GatedNames | None:
    """Return the parts of a gated MLP, which may have its native forward already; None for another module."""
    held = vars(module).get(FUSED)
    return held if isinstance(held, GatedNames) else gated_names(module, float_rows)
