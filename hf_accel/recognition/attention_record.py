"""The record of a trace that also attends: what is written to a cache, and how the code attends to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import nn

from .call_form import BIAS
from .expanded_keys import Expanded
from .left_keys import TakenKeys
from .operation import Operation, UntraceableError
from .packed import as_row, attended_again, is_packed, is_second
from .record import Record
from .scores import Scores
from .source_stand_ins import KEYS, VALUES, SourceKeys
from .stand_ins import ModuleStandIn, StandIn, require
from .symbols import SOURCE, TOKENS, Computed, Zeros


class AttentionRecord(Record):
    """A Record whose code may write keys and values, and attend.

    expanded: the keys and values that the code makes of compressed ones; None if it has made none. leaves: the name
    under which it leaves its keys and values for other layers, None if it leaves none. taken: those of another layer
    that it attends to, None for its own. taken_window: the keys that pages hold of them, None for all. heads_of: gives
    how many heads of keys an attention module reads, and the numbers of a key and a value; None if they are not known.
    masks_biased: whether a trial has shown that the mask has a bias of positions in it.
    """

    expanded: Expanded | None = None
    leaves: str | None = None
    taken: TakenKeys | None = None
    taken_window: int | None = None
    masks_biased = False
    heads_of: Callable[[nn.Module], tuple[int, int, int] | None] = staticmethod(lambda module: None)

    @property
    def mask_hides(self) -> bool:
        """Return whether the mask does nothing but hide keys. Callers may give code that was not tried any numbers."""
        return self.tried

    def write(self, key: Any, value: Any, layer_idx: Any) -> tuple[StandIn, StandIn]:
        require(key, heads=True)
        require(value, heads=True)
        if self.layer_idx is not None or type(layer_idx) is not int or key.heads != value.heads:
            raise UntraceableError("it writes to the cache in a way of its own")
        self.layer_idx = layer_idx
        values = {"heads": key.heads, "dim": key.shape[3], "value_dim": value.shape[3]}
        self.operations.append(Operation("write", [key.span, value.span], [], values=values))
        return replace(key, cached=True), replace(value, cached=True)

    def write_source(self, key: Any, value: Any, layer_idx: Any) -> tuple[StandIn, StandIn]:
        if self.knows_source or self.source is not None:
            raise UntraceableError("it computes keys of an encoder's output that the cache has")
        self.source = SourceKeys.of(self.source_operations, key, value, layer_idx)
        return self.source.kept(self)  # type: ignore[arg-type]

    def attend(self, module: Any, qkv: tuple[Any, Any, Any], mask: Any, options: dict[str, Any]) -> StandIn:
        attended = self._recorded(module, qkv, mask, options)
        return replace(attended, zeros=getattr(qkv[2], "zeros", 0))

    def _recorded(self, module: Any, qkv: tuple[Any, Any, Any], mask: Any, options: dict[str, Any]) -> StandIn:
        if any(isinstance(x, StandIn) and x.rows is SOURCE for x in qkv):
            return self._attend_source(module, qkv, mask, options)
        if is_second(qkv):
            return attended_again(self, module, qkv, mask, options)
        if self.expanded is not None:
            return self.expanded.attended(self, module, qkv, mask=mask, options=options)
        given = {name: value for name, value in options.items() if name != BIAS}
        bias = options.get(BIAS)
        if isinstance(bias, Computed):
            self.bias = bias
        if not isinstance(module, ModuleStandIn) or mask not in (None, self.mask) or bias not in (None, self.bias):
            raise UntraceableError("it attends in a way of its own")
        values = {"options": given, "masked": mask is not None, "biased": bias is not None, "adds_mask": False}
        return self._attend(qkv, (module._module,), values)

    def _attend_source(self, module: Any, qkv: tuple[Any, Any, Any], mask: Any, options: dict[str, Any]) -> StandIn:
        """Record attention to all keys that a cache keeps of an encoder's output; what a mask hides has no keys."""
        query, key, value = self._without_zeros(qkv, options)
        factor = getattr(query, "factor", 1.0)  # of queries that are scaled ahead of the scores
        require(replace(query, factor=1.0) if factor != 1 else query, heads=True)
        kept = isinstance(key, StandIn) and isinstance(value, StandIn)
        kept = kept and (key.span.buffer, value.span.buffer) == (KEYS, VALUES) and key.transposed and value.transposed
        known = isinstance(module, ModuleStandIn) and (mask is None or mask is self.source_mask)
        if not kept or not known or query.rows is not TOKENS or query.cached or query.heads % key.heads:
            raise UntraceableError("it attends to an encoder's output in a way of its own")
        if query.shape[3] != key.shape[3]:
            raise UntraceableError("it attends to an encoder's output in a way of its own")
        bias = options.get(BIAS)
        if isinstance(bias, Zeros):
            self.source_bias = bias
        if bias not in (None, self.source_bias):
            raise UntraceableError("it adds a bias to the scores of an encoder's output")
        values = {
            "options": {name: value for name, value in options.items() if name != BIAS}, "factor": factor,
            "heads": query.heads, "kv_heads": key.heads, "dim": key.shape[3], "value_dim": value.shape[3],
            "biased": bias is not None,
        }  # fmt: skip
        width = query.heads * value.shape[3]
        attended = self.put("attend_source", [query], width, modules=(module._module,), **values)
        return replace(attended, transposed=False, factor=1.0)

    def by_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is F.scaled_dot_product_attention and len(args) == 3 and isinstance(args[1], StandIn):
            return self._attend_as_sdpa(*args, **kwargs)
        return super().by_function(function, args, kwargs)

    def _attend_as_sdpa(self, query: Any, key: StandIn, value: Any, **given: Any) -> StandIn:
        """Record what torch's scaled_dot_product_attention does with the mask of the call."""
        mask, scale = given.pop("attn_mask", None), given.pop("scale", None)
        if mask is None or any(given.values()):
            raise UntraceableError("it attends with a mask of its own, or drops weights")
        scores = key.scores_of(query)
        scores = scores * float(query.shape[-1] ** -0.5 if scale is None else scale) + mask
        return self.attend_by(scores.softmax(-1), value)

    def attend_by(self, scores: Scores, value: Any) -> StandIn:
        if not isinstance(value, StandIn) or value.merged is not scores.key.merged:
            raise UntraceableError("it multiplies values by other numbers than weights")
        merged = value.merged
        query, key, value = (replace(each, merged=False) for each in (scores.query, scores.key, value))
        qkv = query, key, value
        if scores.key.rows is SOURCE or self.layer_idx is not None:
            return self._attend_by_operators(scores, qkv, merged=merged)
        values = {
            "options": {"scaling": scores.factor, "is_causal": False}, "masked": scores.is_masked,
            "biased": scores.is_biased, "adds_mask": True,
        }  # fmt: skip
        attended = replace(self._attend(qkv, (), values), transposed=True)
        return replace(attended, merged=merged)

    def _attend_by_operators(self, scores: Scores, qkv: tuple[Any, Any, Any], *, merged: bool) -> StandIn:
        """Record attention to the keys of a cache by code that computes the scores, and was tried over pages."""
        if not self.tried:
            raise UntraceableError("it computes the scores of a cache by itself")
        options: dict[str, Any] = {"scaling": scores.factor}
        if scores.is_biased or (scores.is_masked and self.masks_biased):
            options[BIAS] = self.bias
        mask = scores.mask if scores.is_masked else None
        return replace(self.attend(self.running[-1], qkv, mask, options), transposed=True, merged=merged)

    def packed(self, x: StandIn) -> StandIn:
        """Record that the columns of each head of [B, T, heads, D] are put end to end; return [B, T, width]."""
        require(replace(x, transposed=True), heads=True)
        taken = self.put("take_heads", [x], x.width, heads=x.heads, dim=x.shape[3])
        return replace(taken, heads=None)

    def choose(self, condition: Any, scores: Scores, other: Any) -> Scores:
        raise UntraceableError("it calls where")

    def keep(self, scores: Scores, kept: Any, others: Any) -> Scores:
        raise UntraceableError("it multiplies scores by more than a number")

    def attend_to_all(
        self, qkv: tuple[Any, Any, Any], scale: float, modules: tuple[nn.Module, ...] = (), **values: Any
    ) -> StandIn:
        """Record attention to all tokens, or to those that a mask shows. values: those that are not as usual."""
        options = {"scaling": scale, "is_causal": False}
        usual = {"options": options, "masked": False, "biased": False, "adds_mask": False}
        return self._attend(qkv, modules, usual | values)

    def _attend(self, qkv: tuple[Any, Any, Any], modules: tuple[nn.Module, ...], values: dict[str, Any]) -> StandIn:
        query, key, value = qkv = self._without_zeros(qkv, values["options"])
        factor = getattr(query, "factor", 1.0)  # of queries that are scaled ahead of the scores
        rows = [as_row(replace(query, factor=1.0) if factor != 1 else query), as_row(key), as_row(value)]
        for x in rows:
            require(x, heads=True)
        if any(map(is_packed, rows)) or (values["biased"] and is_packed(query)):
            raise UntraceableError("it attends in a way of its own")
        same = query.shape[3] == key.shape[3] and key.heads == value.heads and query.heads % key.heads == 0
        if not same or not key.cached is value.cached is (self.layer_idx is not None):
            raise UntraceableError("it attends in a way of its own")
        values["own_bias"] = self.bias if values["biased"] and isinstance(self.bias, Computed) else None
        values |= {
            "heads": query.heads, "kv_heads": key.heads, "dim": query.shape[3], "value_dim": value.shape[3],
            "factor": factor,
        }  # fmt: skip
        attended = self.put("attend", qkv, query.heads * value.shape[3], modules=modules, **values)
        return replace(attended, transposed=False, factor=1.0)

    def _without_zeros(self, qkv: tuple[Any, Any, Any], options: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return queries, keys and values without the zeros behind their heads, which change no score."""
        zeros = {getattr(each, "zeros", 0) for each in qkv}
        if zeros == {0}:
            return qkv
        if len(zeros) > 1 or options.get("scaling") is None:
            raise UntraceableError("it attends in a way of its own")
        query, key, value = (replace(each, zeros=0) for each in qkv)
        return query, key, value
