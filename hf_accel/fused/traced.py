"""What a decoder layer computes, found by running its own code once with stand-ins for tensors and modules.

A stand-in knows only what is written here. Whatever else the code asks of it raises UntraceableError, and the layer keeps its
own forward: nothing is guessed. What the code reads (attributes, submodules) is noted, so that a later change is seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.cpu.decoder_layer import INPUT, OUTPUT
from ..state import FUSED
from .forms import ROTATION, GatedNames, gated_names

Kind = Literal["linear", "gated", "norm", "rope", "write", "attend", "add"]
SCALARS = (bool, int, float, str, torch.dtype, type(None))


class UntraceableError(Exception):
    """The code does what the stand-ins do not know; the message says what, as a clause."""


class Read(NamedTuple):
    """A value that the code depends on: `owner[name]` when it ran."""

    owner: Mapping[str, Any]
    name: str
    value: Any


@dataclass(frozen=True)
class Span:
    """Columns of a buffer whose rows are tokens: those from `offset` on of `stride` numbers."""

    buffer: int
    offset: int
    stride: int


@dataclass
class Operation:
    """inputs, outputs: spans. module: a linear, a norm, a gated MLP, or the attention module. values: what it needs."""

    kind: Kind
    inputs: list[Span]
    outputs: list[Span]
    module: nn.Module | None = None
    values: dict[str, Any] = field(default_factory=dict)


class Tokens:
    """The number of tokens of a pass, which the code may hand on and nothing else."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise UntraceableError("it looks at the number of tokens")

    __hash__ = None  # type: ignore[assignment]


TOKENS: Any = Tokens()


class Opaque:
    """What a layer may only hand on, such as the mask."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it reads {self.name}.{name}")

    def __bool__(self) -> bool:
        raise UntraceableError(f"it looks at {self.name}")


class StandIn:
    """A tensor [1, T, width], [1, T, heads, dim], or [1, heads, T, dim] if it is `turned`.

    factor: what it is still to be multiplied by. cached: whether it came from the cache.
    """

    def __init__(
        self, trace: Trace, span: Span, width: int, *, heads: int | None = None, turned: bool = False,
        factor: float = 1.0, cached: bool = False,
    ) -> None:  # fmt: skip
        self.trace, self.span, self.width, self.heads = trace, span, width, heads
        self.turned, self.factor, self.cached = turned, factor, cached

    def _like(self, **changes: Any) -> StandIn:
        own = {name: getattr(self, name) for name in ("heads", "turned", "factor", "cached")}
        span, width = changes.pop("span", self.span), changes.pop("width", self.width)
        return StandIn(self.trace, span, width, **(own | changes))

    @property
    def shape(self) -> tuple[Any, ...]:
        if self.heads is None:
            return (1, TOKENS, self.width)
        dim = self.width // self.heads
        return (1, self.heads, TOKENS, dim) if self.turned else (1, TOKENS, self.heads, dim)

    def size(self, index: int) -> Any:
        return self.shape[index]

    @property
    def dtype(self) -> torch.dtype:
        return self.trace.dtype

    def view(self, *sizes: Any) -> StandIn:
        first, tokens, *rest = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        if self.turned or tokens is not TOKENS or first != 1 or not 1 <= len(rest) <= 2:
            raise UntraceableError("it reshapes in another way than into heads and back")
        if any(not isinstance(size, int) for size in rest) or rest.count(-1) > 1:
            raise UntraceableError("it reshapes in another way than into heads and back")
        known = rest[0] if len(rest) == 1 else -rest[0] * rest[1] if -1 in rest else rest[0] * rest[1]
        if self.width % known if -1 in rest else known != self.width:
            raise UntraceableError("it reshapes to another size")
        if len(rest) == 1:
            return self._like(heads=None)
        heads = rest[0] if rest[0] != -1 else self.width // rest[1]
        return self._like(heads=heads)

    reshape = view

    def transpose(self, first: int, second: int) -> StandIn:
        if {first, second} != {1, 2} or self.heads is None:
            raise UntraceableError("it transposes other dimensions than heads and tokens")
        return self._like(turned=not self.turned)

    def contiguous(self) -> StandIn:
        return self

    def to(self, dtype: Any) -> StandIn:
        if dtype is not self.trace.dtype:
            raise UntraceableError("it computes in another dtype")
        return self

    def __getitem__(self, index: Any) -> StandIn:
        match index:
            case (builtins_ellipsis, slice(step=None) as columns) if builtins_ellipsis is ... and self.heads is None:
                start, stop, _ = columns.indices(self.width)
                span = Span(self.span.buffer, self.span.offset + start, self.span.stride)
                return self._like(span=span, width=max(0, stop - start))
        raise UntraceableError("it takes other parts of a tensor than columns")

    def __add__(self, other: Any) -> StandIn:
        return self.trace.add(self, other)

    def __mul__(self, other: Any) -> StandIn:
        if type(other) not in (int, float) or self.factor != 1 or self.heads is not None:
            raise UntraceableError("it multiplies by more than a number")
        return self._like(factor=float(other))

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it calls Tensor.{name}")

    def __bool__(self) -> bool:
        raise UntraceableError("it looks at the numbers of a tensor")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.dropout and args and not _drops(*args[1:], **(kwargs or {})):
            return args[0]
        raise UntraceableError(f"it calls {getattr(function, '__name__', function)}")

    def attended(self, module: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[StandIn, None]:
        """What the attention function returns for a query that is a stand-in."""
        return self.trace.attend(module, self, key, value, mask, options), None


def _drops(p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return training and p > 0


class ModuleStandIn:
    """A module whose code runs with stand-ins. What it reads of itself is noted."""

    forward = None  # transformers' checkpointing compares it with its own

    def __init__(self, trace: Trace, module: nn.Module) -> None:
        vars(self).update(_trace=trace, _module=module)

    def __getattr__(self, name: str) -> Any:
        return self._trace.attribute(self, self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UntraceableError(f"it sets its own {name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._trace.run(self, self._module, args, kwargs)


class ConfigStandIn:
    """A config of which the code may read plain values."""

    def __init__(self, trace: Trace, config: Any) -> None:
        vars(self).update(_trace=trace, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name == "_attn_implementation":
            return self._trace.attention  # patch() sets it; the call looks at it again
        value = getattr(self._config, name)
        if not isinstance(value, SCALARS):
            raise UntraceableError(f"it reads config.{name}")
        self._trace.note(vars(self._config), name, value)
        return value


class CacheStandIn(Opaque):
    """The cache of a pass, which takes K and V of one layer."""

    def __init__(self, trace: Trace) -> None:
        super().__init__("past_key_values")
        self.trace = trace

    def update(self, key: Any, value: Any, layer_idx: Any, *args: Any) -> tuple[StandIn, StandIn]:
        return self.trace.write(key, value, layer_idx)

    def __bool__(self) -> bool:
        return True


class Trace:
    """One run of a layer's code. operations, reads, modules: what it did, depends on, and called.

    attention: the name by which the attention function is found. dtype: of the tensors.
    """

    def __init__(self, attention: str, dtype: torch.dtype, float_rows: int = 0) -> None:
        self.attention, self.dtype, self.float_rows = attention, dtype, float_rows
        self.operations: list[Operation] = []
        self.reads: list[Read] = []
        self.modules: list[nn.Module] = []
        self.widths = [0, 0]  # of the buffers; the first two are the layer's input and output
        self.mask, self.tables = Opaque("attention_mask"), (Opaque("cos"), Opaque("sin"))
        self.layer_idx: int | None = None
        self.returns_tuple = False

    def layer(self, layer: nn.Module, width: int, **arguments: Any) -> None:
        """Run the forward of a layer on [1, T, width]. Raises UntraceableError.

        arguments: of the call, by name. Names in `given` get stand-ins; others are plain values, which it may read.
        """
        self.widths[INPUT] = self.widths[OUTPUT] = width
        given = {
            "attention_mask": self.mask, "past_key_values": CacheStandIn(self), "position_embeddings": self.tables,
            "position_ids": Opaque("position_ids"), "cache_position": Opaque("cache_position"),
        }  # fmt: skip
        kwargs = {name: given.get(name, value) for name, value in arguments.items()}
        x = StandIn(self, Span(INPUT, 0, width), width)
        try:
            result = self.run(ModuleStandIn(self, layer), layer, (x,), kwargs)
        except UntraceableError:
            raise
        except Exception as error:  # code that fails on a stand-in in a way of its own
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
        if result.shape != (1, TOKENS, self.widths[OUTPUT]) or last.kind != "add":
            raise UntraceableError("it returns something else than the last sum")
        last.outputs = [Span(OUTPUT, 0, self.widths[OUTPUT])]

    def note(self, owner: Mapping[str, Any], name: str, value: Any) -> None:
        self.reads.append(Read(owner, name, value))

    # -- modules ---------------------------------------------------------------------------------------

    def attribute(self, stand_in: ModuleStandIn, module: nn.Module, name: str) -> Any:
        """What the code reads as self.name."""
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
            if isinstance(value, SCALARS):
                return value
            if callable(getattr(value, "to_dict", None)):
                return ConfigStandIn(self, value)
            raise UntraceableError(f"it reads its own {name}")
        value = inspect.getattr_static(original_class(module), name)
        self.note(own, name, None)  # an attribute of the module would be found before that of its class
        if isinstance(value, FunctionType):
            return MethodType(value, stand_in)
        if isinstance(value, property) and value.fget is not None:
            return value.fget(stand_in)
        if isinstance(value, SCALARS):
            return value
        raise UntraceableError(f"it reads its own {name}")

    def child(self, module: nn.Module) -> Callable[..., Any]:
        """What stands in for a submodule."""
        if isinstance(module, nn.Linear):
            return lambda x: self.linear(module, x)
        if type(module).__name__.endswith("RMSNorm"):
            return lambda x: self.norm(module, x)
        if isinstance(module, (nn.Dropout, nn.Identity)):
            self.note(vars(module), "training", module.training)
            self.modules.append(module)
            if isinstance(module, nn.Dropout) and module.training and module.p > 0:
                raise UntraceableError("it drops numbers at random")
            return lambda x: x
        names = gated_names_of(module, self.float_rows)
        if names is not None:
            return lambda x: self.gated(module, names, x)
        return ModuleStandIn(self, module)

    def run(self, stand_in: ModuleStandIn, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the code of a module's class."""
        self.modules.append(module)
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
        self.modules.append(module)
        out = self.buffer(module.out_features)
        self.operations.append(Operation("linear", [x.span], [out], module))
        return StandIn(self, out, module.out_features)

    def gated(self, module: nn.Module, names: GatedNames, x: Any) -> StandIn:
        """down(act(gate(x)) * up(x)), of which the product is one operation."""
        self._require(x, heads=False)
        parts = vars(module)["_modules"]
        gate, up, down = (parts[name] for name in (names.gate, names.up, names.down))
        self.modules += [module, gate, up]
        for name in (names.gate, names.up, names.down):
            self.note(parts, name, parts[name])
        if names.activation is not None:
            name, tried = names.activation
            self.note(parts if isinstance(tried, nn.Module) else vars(module), name, tried)
            self.modules += [tried] if isinstance(tried, nn.Module) else []
        out = self.buffer(gate.out_features)
        self.operations.append(
            Operation("gated", [x.span], [out], module, {"layers": (gate, up), "epilogue": names.call.epilogue})
        )
        return self.linear(down, StandIn(self, out, gate.out_features))

    def norm(self, module: nn.Module, x: Any) -> StandIn:
        weight = module._parameters.get("weight")
        if not isinstance(x, StandIn) or x.turned or x.factor != 1 or weight is None:
            raise UntraceableError("a norm takes something else than numbers of tokens")
        if x.shape[-1] != weight.shape[0]:
            raise UntraceableError("a norm takes another number of inputs")
        self.modules.append(module)
        out = self.buffer(x.width)
        heads = x.heads or 1
        self.operations.append(Operation("norm", [x.span], [out], module, {"heads": heads, "dim": x.width // heads}))
        return StandIn(self, out, x.width, heads=x.heads)

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
        self.operations.append(Operation("rope", [q.span, k.span], outs, None, values))
        return q._like(span=outs[0]), k._like(span=outs[1])

    def write(self, key: Any, value: Any, layer_idx: Any) -> tuple[StandIn, StandIn]:
        self._require(key, heads=True)
        self._require(value, heads=True)
        if self.layer_idx is not None or type(layer_idx) is not int or key.heads != value.heads:
            raise UntraceableError("it writes to the cache in a way of its own")
        self.layer_idx = layer_idx
        values = {"heads": key.heads, "dim": key.shape[3], "value_dim": value.shape[3]}
        self.operations.append(Operation("write", [key.span, value.span], [], None, values))
        return key._like(cached=True), value._like(cached=True)

    def attend(
        self, module: Any, query: StandIn, key: Any, value: Any, mask: Any, options: dict[str, Any]
    ) -> StandIn:
        for x in (query, key, value):
            self._require(x, heads=True)
        if not isinstance(module, ModuleStandIn) or not (key.cached and value.cached) or mask is not self.mask:
            raise UntraceableError("it attends in a way of its own")
        if query.shape[3] != key.shape[3] or query.heads % key.heads:
            raise UntraceableError("it attends in a way of its own")
        out = self.buffer(query.heads * value.shape[3])
        values = {
            "options": options, "heads": query.heads, "kv_heads": key.heads, "dim": key.shape[3],
            "value_dim": value.shape[3],
        }  # fmt: skip
        self.operations.append(Operation("attend", [query.span], [out], module._module, values))
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
        self.operations.append(Operation("add", [x.span, y.span], [out], None, {"dim": x.width, "factor": y.factor}))
        return StandIn(self, out, x.width)

    @staticmethod
    def _require(x: Any, *, heads: bool) -> None:
        """heads: whether x must be [1, heads, T, dim], else [1, T, width]."""
        if not isinstance(x, StandIn) or x.turned is not heads or (x.heads is not None) is not heads or x.factor != 1:
            raise UntraceableError("its tensors have another layout")


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before a native forward was mixed in."""
    kind: type[nn.Module] = getattr(type(module), "original_class", type(module))
    return kind


def with_rotation(forward: Any, rotate: Callable[..., Any]) -> FunctionType:
    """A copy of a forward that finds another function under the name of its rotation."""
    copy = FunctionType(
        forward.__code__, forward.__globals__ | {ROTATION: rotate}, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def gated_names_of(module: nn.Module, float_rows: int) -> GatedNames | None:
    """The parts of a gated MLP, which may have its native forward already; None if it is none."""
    held = vars(module).get(FUSED)
    return held if isinstance(held, GatedNames) else gated_names(module, float_rows)
