"""Records of parts that several recurrent modules have: what they are given, linear layers and short convolutions."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import nn

from ...recognition.model_stand_ins import CacheStandIn
from ...recognition.operation import Operation, UntraceableError
from ...recognition.stand_ins import StandIn, require
from ...recognition.unchanged import Read
from ...undo.state import FUSED


def input_of(trace: Any, args: Any, given: dict[str, Any], *, cache: str, others: Container[str]) -> StandIn:
    """Return the hidden states that a module is given. Raises UntraceableError if it is given what is not known.

    given: its keywords, which are taken out. cache: the one that names the cache. others: those that it does not read.
    """
    x = args[0] if args else given.pop("hidden_states", None)
    require(x, heads=False, flat=False)
    held, mask = given.pop(cache, None), given.pop("attention_mask", None)
    unknown = [name for name, value in given.items() if value is not None and name not in others]
    if len(args) > 1 or unknown or not isinstance(held, CacheStandIn) or mask not in (None, trace.mask):
        raise UntraceableError("a recurrent module is given more than is known")
    if not x.is_whole:
        raise UntraceableError("a recurrent module is given a part of a tensor")
    whole: StandIn = x
    return whole


def note_kept(trace: Any, module: nn.Module) -> None:
    """Note that a module and its parts are not called, and must stay as they are."""
    trace.note(vars(module), FUSED, vars(module).get(FUSED))
    trace.visit(module)
    trace.reads += settings_of_parts(module)


def settings_of_parts(module: nn.Module) -> list[Read]:
    """Return the reads of all that a module and its parts hold, and of their classes."""
    return [read for each in with_parts(module) for read in _settings(each)]


def with_parts(module: nn.Module) -> list[nn.Module]:
    return [module, *(child for child in module._modules.values() if child is not None)]


def _settings(module: nn.Module) -> Iterator[Read]:
    own = module.__dict__
    yield Read(module, "__class__", type(module))
    yield from (Read(own, name, value) for name, value in own.items() if name != FUSED)
    for place in ("_modules", "_parameters", "_buffers"):
        yield from (Read(own[place], name, value) for name, value in own[place].items())


def record_linear(module: nn.Module, x: StandIn) -> StandIn:
    """Record a linear layer of a module. Raises UntraceableError for one that an adapter is around."""
    if not isinstance(module, nn.Linear):
        raise UntraceableError("a linear layer has no native call")
    trace: Any = x.trace
    recorded: StandIn = trace.linear(module, x)
    return recorded


def parts_of_heads(x: StandIn, heads: int, sizes: Sequence[int]) -> list[StandIn]:
    """Return the parts of each head of x [B, T, heads * sum(sizes)], each [B, T, heads, size]."""
    of_heads, ends = x.view(*x.shape[:2], heads, -1), list(accumulate(sizes))
    if ends[-1] != of_heads.shape[-1]:
        raise UntraceableError("its projections have other sizes than their heads")
    return [of_heads[..., end - size : end] for size, end in zip(sizes, ends, strict=True)]


def record_joined_heads(parts: Sequence[StandIn]) -> StandIn:
    """Record that the numbers of all heads of each part [B, T, heads, size] stand end to end, as the parts do."""
    trace: Any = parts[0].trace
    whole, offset = trace.buffer(sum(part.width for part in parts)), 0
    for part in parts:
        place = replace(whole, offset=offset)
        values = {"heads": part.heads, "dim": part.shape[-1]}
        trace.operations.append(Operation("take_heads", [part.span], [place], values=values))
        offset += part.width
    return replace(parts[0], span=whole, width=offset, heads=None)


def record_convolution(conv: Any, x: StandIn) -> StandIn:
    """Record the short convolution in front of a recurrence and its silu. Returns float32."""
    trace: Any = x.trace
    trace.visit(conv)
    recorded: StandIn = trace.put(
        "short_conv", [x], trace.floats * x.width, dim=x.width, value_dim=conv.kernel_size[0], activation="silu",
        weight=conv._parameters["weight"], bias=conv._parameters["bias"],
    )  # fmt: skip
    return recorded


def record_rounded(x: StandIn, width: int) -> StandIn:
    """Record the numbers of what gives float32, such as a convolution, in the dtype of the layer."""
    trace: Any = x.trace
    rounded: StandIn = x if trace.floats == 1 else trace.convert(replace(x, width=width, wide=True))
    return rounded


def record_widened(x: StandIn) -> StandIn:
    """Record the numbers of x as what gives float32 has them."""
    trace: Any = x.trace
    if trace.floats == 1:
        return x
    return replace(trace.convert(x), width=x.width * trace.floats, wide=False)


def record_kept_convolution(conv: Any, x: StandIn, layer_idx: int) -> StandIn:
    """Record the short convolution of a layer whose inputs stay in pages, one half as keys and one as values."""
    trace: Any = x.trace
    if x.width % 2:
        raise UntraceableError("its convolution has an odd number of channels")
    trace.visit(conv)
    trace.write(*(part.view(*part.shape[:2], 1, -1).transpose(1, 2) for part in x.chunk(2, dim=-1)), layer_idx)
    recorded: StandIn = trace.put(
        "page_conv", [x], x.width, dim=x.width, value_dim=conv.kernel_size[0],
        weight=conv._parameters["weight"], bias=conv._parameters["bias"],
    )  # fmt: skip
    return recorded


def record_product(x: StandIn, y: StandIn) -> StandIn:
    """Record the product of two tensors."""
    trace: Any = x.trace
    recorded: StandIn = trace.put("gate", [x, y], x.width, activation=None, heads=1, dim=x.width)
    return recorded
