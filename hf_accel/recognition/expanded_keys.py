"""Attention over compressed keys in a trace (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

A cache keeps latents [B, 1, T, rank] and the rotated part of the keys, which all heads share. The code makes keys and
values of them by a linear layer; what is recorded multiplies queries and results by its weight instead, and attends to
what the cache keeps, as `attention/expansion.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .operation import Operation, Span, UntraceableError
from .row_convolution import sizes_of_linear
from .stand_ins import ModuleStandIn, StandIn, require

EXPANSION = "kv_b_proj"  # the linear layer that makes keys and values
# The numbers of a latent, of a head's keys that come from it, of those that are rotated, and of a head's values.
ROTATED = "qk_rope_head_dim"
SIZES = ("kv_lora_rank", "qk_nope_head_dim", ROTATED, "v_head_dim")
MADE_KEYS, MADE_VALUES = -(10**9), -(10**9) - 1  # buffers that no operation reads or writes


@dataclass(frozen=True, eq=False)
class Expanded:
    """The keys and values that code makes of compressed ones.

    keys, values: what stands for them. module: whose code it is. linear: its EXPANSION. kept: what the cache keeps,
    [B, 1, T, rank + rotated]. rank, rotated: the numbers of its two parts. heads: of keys and values.
    """

    keys: StandIn
    values: StandIn
    module: nn.Module
    linear: nn.Module
    kept: StandIn
    rank: int
    rotated: int
    heads: int

    def attended(
        self, trace: Any, module: Any, qkv: tuple[Any, Any, Any], *, mask: Any, options: dict[str, Any]
    ) -> StandIn:
        """Record attention to these keys. Raises UntraceableError. trace: an AttentionRecord."""
        query, key, value = qkv
        require(query, heads=True)
        own = isinstance(module, ModuleStandIn) and module._module is self.module
        if not own or key is not self.keys or value is not self.values or query.shape != key.shape or query.cached:
            raise UntraceableError("it attends to compressed keys in a way of its own")
        if mask not in (None, trace.mask) or type(options.get("scaling")) not in (int, float):
            raise UntraceableError("it attends to compressed keys in a way of its own")
        heads, dim, value_dim, width = self.heads, key.shape[3], value.shape[3], self.rank + self.rotated
        modules = self.linear, self.module
        absorbed = trace.put(
            "head_products", [query], heads * width, modules=modules, heads=heads, dim=dim - self.rotated,
            value_dim=self.rank, kept=self.rotated, transposed=True,
        )  # fmt: skip
        values = {
            "options": options, "masked": mask is not None, "biased": False, "adds_mask": False,
            "made": (heads, heads, dim, value_dim),
        }  # fmt: skip
        latents = replace(self.kept, width=self.rank)
        attended = trace._attend((absorbed, self.kept, latents), (self.module,), values)
        made: StandIn = trace.put(
            "head_products", [attended], heads * value_dim, modules=modules, heads=heads, dim=self.rank,
            value_dim=value_dim, kept=0, transposed=False,
        )  # fmt: skip
        return made


def expand_latents(trace: Any, own: ModuleStandIn, latents: Any, rotated: Any) -> tuple[StandIn, StandIn]:
    """Return what stands for keys and values [B, H, T, D] that `own` makes of what a cache has returned.

    The cache then keeps both parts as one. Raises UntraceableError. trace: an AttentionRecord.
    """
    rank, key, size, value = (int(getattr(own, name)) for name in SIZES)
    write = next((each for each in trace.operations if each.kind == "write"), None)
    parts = vars(own._module)["_modules"]
    linear = parts.get(EXPANSION)
    trace.note(parts, EXPANSION, linear)
    known = trace.expanded is None and linear is not None
    known = known and all(isinstance(x, StandIn) and x.cached and x.heads == 1 for x in (latents, rotated))
    if write is None or not known or (latents.width, rotated.width) != (rank, size):
        raise UntraceableError("it makes keys and values of something else than what a cache keeps")
    inputs, outputs = sizes_of_linear(linear)
    if write.inputs != [latents.span, rotated.span] or inputs != rank or outputs % (key + value):
        raise UntraceableError("it makes keys and values of something else than what a cache keeps")
    trace.visit(linear)
    place, joined, heads = trace.operations.index(write), trace.buffer(rank + size), outputs // (key + value)
    trace.operations[place : place + 1] = [
        Operation("join", write.inputs, [joined], values={"heads": 1, "dim": rank, "value_dim": size}),
        Operation("write", [joined, joined], [], values={"heads": 1, "dim": rank + size, "value_dim": 0}),
    ]
    kept = replace(latents, span=joined, width=rank + size)
    keys, values = (
        replace(latents, span=Span(buffer, 0, heads * dim), width=heads * dim, heads=heads)
        for buffer, dim in ((MADE_KEYS, key + size), (MADE_VALUES, value))
    )
    trace.expanded = Expanded(keys, values, own._module, linear, kept, rank, size, heads)
    return keys, values
