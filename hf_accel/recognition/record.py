"""The record of a trace: its operations, as the stand-ins for tensors ask for them.

An operation is recorded here, by what the code calls for it, and computed by its entry in fused/operations.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import dropwhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .call_form import BIAS, MASK, SOURCE_BIAS, SOURCE_MASK
from .of_positions import OfPositions, RoundedNext
from .operation import Kind, Operation, Span, UntraceableError, WidthError
from .packed import Starts, joined
from .rotations import rotate
from .row_convolution import sizes_of_linear
from .scores import PRODUCTS, drops
from .source_stand_ins import FIRST_OF_SOURCE, SourceKeys, as_source
from .stand_ins import ModuleStandIn, StandIn, require
from .symbols import SOURCE, TOKENS, Opaque, Vector
from .trial import NORM_SIZES, PLAIN_ACTIVATIONS, GatedNames, activation_name, layer_norm_form, settings_of_norm
from .unchanged import HOOKS, Read, has_own_forward, is_derived, is_others_class, replaced_in

ZEROS = (("constant", None), ("constant", 0))  # how code asks pad for zeros


class Record:
    """The operations of a layer and what they depend on.

    operations: what the code computed. reads: the values that must not change. hooks: those of the modules that it
    called; usually none. dtype, device: of the tensors. table_size: the numbers of cos of a token, which may be fewer
    than those of a head; None for as many. layer_idx: the layer of the cache that is written, None if there is none.
    source: how the keys of an encoder's output are computed; None if the code attends to none. knows_source: whether
    the cache has them before the pass. tried: whether a trial of the model has shown that its tokens see those before
    them, and all of an encoder's output, whatever its code does with masks. running: the modules whose code runs.
    of_layer: the buffer of what the layer is given besides its hidden states, as Gemma 4's are; None for no such.
    overwritten: buffers in whose place the code has written, and the operation that did so.
    """

    source: SourceKeys | None = None
    of_layer: Span | None = None
    knows_source = False
    tried = False

    def __init__(self, dtype: torch.dtype, *, table_size: int | None = None, device: torch.device) -> None:
        self.dtype, self.table_size, self.device = dtype, table_size, device
        self.operations: list[Operation] = []
        self.reads: list[Read] = []
        self.hooks: list[Mapping[Any, Any]] = []
        self.widths = [0, 0]  # of the buffers; the first two are the layer's input and output
        self.mask, self.tables = Opaque(MASK), (Opaque("cos"), Opaque("sin"))
        self.bias: Any = Opaque(BIAS)
        self.source_mask, self.source_bias = Opaque(SOURCE_MASK), Opaque(SOURCE_BIAS)
        self.starts = Starts()
        self.source_operations: list[Operation] = []  # on the rows of an encoder's output
        self.given: dict[str, Any] = {}  # what stands for the tensors of the call
        self.layer_idx: int | None = None
        self.running: list[ModuleStandIn] = []
        self.overwritten: list[tuple[int, Operation]] = []

    def note(self, owner: Mapping[str, Any], name: str, value: Any) -> None:
        self.reads.append(Read(owner, name, value))

    def note_class(self, module: nn.Module) -> None:
        self.reads.append(Read(module, "__class__", type(module)))

    def visit(self, module: nn.Module) -> None:
        """Note the class of a module, and the hooks around it. Raises UntraceableError if its forward was replaced."""
        own = vars(module)
        for name in ("forward", *HOOKS):
            self.note(own, name, own.get(name))
        self.note_class(module)
        self.hooks += [own[name] for name in HOOKS]
        if (replaced := replaced_in([module])) is not None:
            raise UntraceableError(replaced)
        if has_own_forward(module):
            raise UntraceableError("the forward of a module was replaced on the module itself")
        if is_derived(type(module)):
            raise UntraceableError("a module got a class of others")

    def visit_known(self, module: nn.Module) -> None:
        """Visit a module whose code is not read. Raises UntraceableError also if others wrote it."""
        self.visit(module)
        if is_others_class(type(module)):
            raise UntraceableError(f"{type(module).__name__} is a class of others")

    def buffer(self, width: int) -> Span:
        self.widths.append(width)
        return Span(len(self.widths) - 1, 0, width)

    def put(
        self, kind: Kind, inputs: Sequence[StandIn], width: int, *, modules: tuple[nn.Module, ...] = (), **values: Any
    ) -> StandIn:
        """Record an operation with one result, and return that: a tensor of the form of the first input."""
        if any(x.wide for x in inputs):
            raise UntraceableError("it computes in another dtype")
        if any(x.rows is SOURCE for x in inputs) and kind != "attend":
            return self._put_source(Operation(kind, [x.span for x in inputs], [], modules, values), inputs, width)
        out = self.buffer(width)
        self.operations.append(Operation(kind, [x.span for x in inputs], [out], modules, values))
        return replace(inputs[0], span=out, width=width, cached=False, apart=1)

    def _put_source(self, operation: Operation, inputs: Sequence[StandIn], width: int) -> StandIn:
        if operation.kind != "linear":
            raise UntraceableError("it computes keys of an encoder's output in a way of its own")
        out = as_source(inputs[0], width, len(self.source_operations))
        self.source_operations.append(replace(operation, outputs=[out.span]))
        return out

    # -- by modules ------------------------------------------------------------------------------------

    def linear(self, module: nn.Module, x: Any) -> StandIn:
        x = self.multiplied(x)
        require(x, heads=False)
        inputs, outputs = sizes_of_linear(module)
        if x.span.buffer != FIRST_OF_SOURCE and x.width != inputs:
            raise WidthError("a linear layer takes another number of inputs")
        self.visit_known(module)
        return self.put("linear", [x], outputs, modules=(module,))

    def activate(self, name: str, x: Any) -> StandIn:
        x, heads = self.multiplied(x), getattr(x, "apart", 1)
        require(replace(x, apart=1) if heads > 1 else x, heads=False)
        return self.put("activation", [x], x.width, activation=name, heads=heads)

    def layer_norm(self, module: nn.Module, x: Any) -> StandIn:
        """Record a LayerNorm of a row, or of each of its heads: torch's, or code that a trial finds to be one."""
        form = layer_norm_form(module)
        if form is None:
            raise UntraceableError("a norm is not known")
        heads = x.heads if isinstance(x, StandIn) and not x.merged else None
        require(x if heads is None else replace(x, heads=None, transposed=False), heads=False)
        own, dim = vars(module), x.shape[-1]
        weight = module._parameters.get("weight")
        sizes = own[NORM_SIZES] if NORM_SIZES in own or weight is None else tuple(weight.shape)
        by_head = sizes == (heads, dim) and not x.transposed
        if sizes != (dim,) and not by_head:
            raise UntraceableError("a norm takes another number of inputs")
        (self.visit_known if type(module) is nn.LayerNorm else self.visit)(module)  # code of others was tried
        for name, value in settings_of_norm(module).items():
            self.note(own, name, value)
        values = form._asdict() | {"heads": heads or 1, "dim": dim, "by_head": by_head}
        return self.put("layer_norm", [x], x.width, modules=(module,), **values)

    def norm(self, module: nn.Module, x: Any) -> StandIn:
        weight = module._parameters.get("weight")
        self.note(module._parameters, "weight", weight)
        if not isinstance(x, StandIn) or x.factor != 1 or x.flat or x.apart > 1 or x.wide or x.zeros:
            raise UntraceableError("a norm takes something else than numbers of tokens")
        if weight is None and (module._parameters or self.device.type != "cpu"):
            raise UntraceableError("a norm has a weight that is computed, or none on another device than the CPU")
        dim: int = x.shape[-1]
        if weight is not None and weight.shape != (dim,):
            raise UntraceableError("a norm takes another number of inputs")
        self.visit(module)
        return self.put("norm", [x], x.width, modules=(module,), heads=x.heads or 1, dim=dim)

    def gated(self, module: nn.Module, names: GatedNames, x: Any) -> StandIn:
        """Record down(act(gate(x)) * up(x)), where the product is one operation."""
        require(x, heads=False, flat=False)
        parts = vars(module)["_modules"]
        gate, up, down = (parts[name] for name in (names.gate, names.up, names.down))
        self.visit(module)
        for each in (gate, up):
            self.visit_known(each)
        for name in (names.gate, names.up, names.down):
            self.note(parts, name, parts[name])
        if names.activation is not None:
            name, tried = names.activation
            holder = parts if isinstance(tried, nn.Module) else vars(module)
            self.note(holder, name, holder.get(name))
            if isinstance(tried, nn.Module):
                self.visit_known(tried)
            if holder.get(name) is not tried:
                raise UntraceableError("the activation of its MLP is not the one that was tried")
        product = self.put("gated", [x], gate.out_features, modules=(gate, up), epilogue=names.epilogue)
        return self.linear(down, product)

    # -- by operators and functions --------------------------------------------------------------------

    def by_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a function of torch returns for stand-ins."""
        if function is F.dropout and args and not drops(*args[1:], **kwargs):
            return args[0]
        if function is torch.chunk and isinstance(args[0], StandIn):
            return args[0].chunk(*args[1:], **kwargs)
        if function is torch.split and isinstance(args[0], StandIn):
            return args[0].split(*args[1:], **kwargs)
        if function in PRODUCTS and len(args) == 2 and not kwargs:
            return args[0] @ args[1]
        if isinstance(args[0], StandIn) and len(args) == 1 and not kwargs.get("inplace"):
            name = activation_name(partial(function, **kwargs), PLAIN_ACTIVATIONS)
            if name is not None:
                return self.activate(name, args[0])
        if function is F.pad and len(args) == 2 and (kwargs.get("mode", "constant"), kwargs.get("value")) in ZEROS:
            return args[0].padded(args[1])
        if function is torch.cat and kwargs == {"dim": -1} and len(args) == 1 and len(args[0]) == 2:
            return self.join(*args[0])
        if function is torch.cat and isinstance(args[0], (tuple, list)):
            return joined(*args, **kwargs)
        raise UntraceableError(f"it calls {getattr(function, '__name__', function)}")

    def convert(self, x: StandIn) -> StandIn:
        """Record the numbers of a tensor as float32, or those of a wide one rounded."""
        require(replace(x, wide=False), heads=False, flat=False)
        if x.rows is SOURCE or x.span.offset or x.span.stride != x.width * (self.floats if x.wide else 1):
            raise UntraceableError("it computes in another dtype")
        out = self.buffer(x.width * (1 if x.wide else self.floats))
        self.operations.append(Operation("convert", [x.span], [out], values={"dim": x.width, "wide": not x.wide}))
        return replace(x, span=out, wide=not x.wide)

    @property
    def floats(self) -> int:
        """The numbers of the layer whose place a float32 takes."""
        return torch.float32.itemsize // self.dtype.itemsize

    def _add_wide(self, x: StandIn, y: StandIn) -> StandIn:
        """Record the sum of a wide tensor and one that is not, which is wide."""
        same = x.wide and not y.wide and x.shape == y.shape and x.factor == y.factor == 1 and y.is_whole
        if not same or x.flat:
            raise UntraceableError("it adds something else than two tensors of one shape")
        out = self.buffer(x.span.stride)
        values = {"dim": x.width, "factor": 1.0, "wide": True}
        self.operations.append(Operation("add", [x.span, y.span], [out], values=values))
        return replace(x, span=out)

    def add(self, x: Any, y: Any) -> StandIn:
        if isinstance(y, Vector):
            return self.shift(x, y)
        if isinstance(x, StandIn) and isinstance(y, StandIn) and (x.wide or y.wide):
            return self._add_wide(x, y) if x.wide else self._add_wide(y, x)
        same = isinstance(x, StandIn) and isinstance(y, StandIn) and x.width == y.width
        if same and x.factor != 1:
            x, y = y, x
        x = self.multiplied(x)
        if not same or x.flat is not y.flat or not (x.is_whole and y.is_whole):
            raise UntraceableError("it adds something else than two tensors of one shape")
        return self.put("add", [x, y], x.width, dim=x.width, factor=y.factor)

    def multiply(self, x: StandIn, other: Any) -> Any:
        """Multiply by something else than a number."""
        if isinstance(other, StandIn):
            return self.gate(x, other)
        if isinstance(other, OfPositions):
            return self.by_positions(x, other)
        if not isinstance(other, Vector):
            raise UntraceableError("it multiplies by more than a number")
        require(x, heads=False, flat=False)
        if other.parameter.shape == (1,) and x.is_whole and other.parameter.dtype is self.dtype:
            return self.put("multiply", [x], x.width, factor=1.0, vector=other, dim=x.width)
        if other.parameter.shape != (x.width,) or other.parameter.dtype is not self.dtype:
            raise UntraceableError("it multiplies by a parameter of another size or dtype")
        return self.put("scale", [x], x.width, vector=other)

    def multiply_in_place(self, x: StandIn, other: Any) -> StandIn:
        """Record the product of a sum with a parameter that is one number, which takes the place of the sum.

        Whatever reads the sum later, by another name, would read the product: see `refuse_overwritten`.
        """
        made = [o.kind for o in self.operations if any(span.buffer == x.span.buffer for span in o.outputs)]
        if made != ["add"] or not isinstance(other, Vector) or other.parameter.shape != (1,):
            raise UntraceableError("it writes to a tensor in place")
        product: StandIn = self.multiply(x, other)
        self.overwritten.append((x.span.buffer, self.operations[-1]))
        return product

    def add_in_place(self, x: StandIn, other: Any) -> StandIn:
        """Record the sum of what a linear layer gave and another tensor, which takes the place of the former."""
        made = [o.kind for o in self.operations if any(span.buffer == x.span.buffer for span in o.outputs)]
        if made != ["linear"] or not isinstance(other, StandIn) or x.factor != 1 or x.span.buffer == other.span.buffer:
            raise UntraceableError("it writes to a tensor in place")
        total = self.add(x, other)
        self.overwritten.append((x.span.buffer, self.operations[-1]))
        return total

    def refuse_overwritten(self) -> None:
        """Raise UntraceableError if the code reads a tensor again in whose place it has written."""
        for buffer, writes in self.overwritten:
            later = list(dropwhile(lambda each: each is not writes, self.operations))[1:]  # noqa: B023
            if any(span.buffer == buffer for operation in later for span in operation.inputs):
                raise UntraceableError("it writes to a tensor in place")

    def by_positions(self, x: StandIn, numbers: OfPositions) -> Any:
        """Record x, [B, H, T, D] or [B, T, H, D], times a number of each token, by its position."""
        dtype = numbers.tried(heads_first=x.transposed)
        plain = replace(x, heads=None, transposed=False)
        require(plain, heads=False, flat=False)
        if (
            x.heads is None
            or x.span.head
            or x.rows is not TOKENS
            or x.cached
            or dtype not in (torch.float32, self.dtype)
        ):
            raise UntraceableError("it multiplies something else than heads by numbers of positions")
        if any(o.kind == "by_position" and o.values["numbers"] != numbers for o in self.operations):
            raise UntraceableError("it multiplies by several numbers of a position")
        product = self.put("by_position", [x], x.width, dim=x.width, numbers=numbers)
        return product if dtype is self.dtype else RoundedNext(product)

    def multiplied(self, x: Any, vector: Vector | None = None) -> Any:
        """Return x times its factor as a tensor of its own, or times the numbers of its columns."""
        if not isinstance(x, StandIn) or (x.factor == 1 and vector is None) or x.rows is SOURCE:
            return x
        whole = replace(x, heads=None, transposed=False, factor=1.0)
        others = x.cached or x.apart > 1 or x.merged or x.zeros or (vector is not None and x.factor != 1)
        if not whole.is_whole or others:
            raise UntraceableError("it multiplies a part of a tensor")
        return self.put("multiply", [replace(x, factor=1.0)], x.width, factor=x.factor, vector=vector, dim=x.width)

    def shift(self, x: StandIn, bias: Vector) -> StandIn:
        """Record vector * y + bias as one operation in place of the product x."""
        scale = next((each for each in self.operations if each.kind == "scale" and each.outputs == [x.span]), None)
        if scale is None or not replace(x, span=scale.inputs[0]).is_whole:
            raise UntraceableError("it adds a parameter to something else than scaled columns")
        if bias.parameter.shape != (x.width,) or bias.parameter.dtype is not self.dtype:
            raise UntraceableError("it adds a parameter of another size or dtype")
        self.operations.remove(scale)
        before = replace(x, span=scale.inputs[0])
        return self.put("affine", [before], x.width, **scale.values, bias=bias, dim=x.width)

    def gate(self, x: StandIn, y: StandIn) -> StandIn:
        """Record act(x) * y, in either order, as one operation in place of the activation."""
        place, other = next(
            ((i, b) for a, b in ((x, y), (y, x)) for i, operation in enumerate(self.operations)
             if operation.kind == "activation" and operation.outputs == [a.span]), (None, None),
        )  # fmt: skip
        for each in (x, y):
            require(each, heads=False, flat=False)
        if place is None or other is None or x.width != y.width or x.span == y.span:
            raise UntraceableError("it multiplies two tensors of which none is an activation")
        activation = self.operations.pop(place)
        before = replace(x, span=activation.inputs[0])
        dim = x.width // activation.values["heads"]
        return self.put("gate", [before, other], x.width, **activation.values, dim=dim)

    def join(self, x: Any, y: Any) -> StandIn:
        """Record that the numbers of each head of y follow those of x."""
        for each in (x, y):  # [B, H, T, D], or both [B, T, H, D]
            require(replace(each, transposed=True) if isinstance(each, StandIn) else each, heads=True)
        if isinstance(y, StandIn) and not y.width:  # of heads that are rotated as a whole
            return x  # type: ignore[no-any-return]
        if x.transposed is not y.transposed or x.heads != y.heads or x.cached or y.cached or not (x.width and y.width):
            raise UntraceableError("it joins something else than parts of heads")
        values = {"heads": x.heads, "dim": x.shape[3], "value_dim": y.shape[3]}
        return self.put("join", [x, y], x.width + y.width, **values)

    def rotate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return rotate(self, original, *args, **kwargs)
