"""Keys and values that a layer leaves for later ones, which attend to them in place of their own, as in Gemma 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from .call_form import SHARED_KEYS
from .operation import Span, UntraceableError
from .stand_ins import StandIn
from .symbols import Opaque

KEYS_LEFT, VALUES_LEFT = -101, -102  # the buffers of keys and values that another layer has left
STORES = "store"  # what configs call a layer that leaves its keys and values to others


class TakenKeys(NamedTuple):
    """Keys and values of another layer that a layer attends to.

    name: under which they are found. heads, dim, value_dim: theirs.
    """

    name: str
    heads: int
    dim: int
    value_dim: int


class SharedKeys(Opaque):
    """A dictionary in which layers leave keys and values, and find those of others. record: an AttentionRecord."""

    def __init__(self, record: Any) -> None:
        super().__init__(SHARED_KEYS)
        vars(self).update(_record=record)

    def __setitem__(self, name: Any, given: Any) -> None:
        record: Any = self._record
        written = next((each.inputs for each in record.operations if each.kind == "write"), None)
        pair = given if isinstance(given, tuple) and len(given) == 2 else ()
        known = all(isinstance(x, StandIn) and x.cached and x.transposed for x in pair)
        if not known or type(name) is not str or written != [x.span for x in pair] or record.leaves is not None:
            raise UntraceableError("it leaves something else for others than its keys and values")
        record.leaves = name

    def __getitem__(self, name: Any) -> tuple[StandIn, StandIn]:
        record: Any = self._record
        module = vars(record.running[-1])["_module"]
        heads, index = record.heads_of(module), place_of_left(module, name)
        if heads is None or index is None or record.layer_idx is not None or record.taken is not None:
            raise UntraceableError("it takes keys and values in a way of its own")
        record.taken, record.layer_idx = TakenKeys(name, *heads), index
        kv_heads, dim, value_dim = heads
        keys = StandIn(
            record, Span(KEYS_LEFT, 0, kv_heads * dim), kv_heads * dim, kv_heads, transposed=True, cached=True
        )
        size = kv_heads * value_dim
        return keys, replace(keys, span=Span(VALUES_LEFT, 0, size), width=size)


def place_of_left(module: Any, name: Any) -> int | None:
    """Return the number of the last layer before an attention module that leaves keys and values under a name, as its
    config says, which a call must bear out; None if it does not say so.
    """
    config, own = vars(module).get("config"), vars(module).get("layer_idx")
    modes, names = (getattr(config, kind, None) for kind in ("kv_sharing_modes", "layer_types"))
    if not modes or not names or type(own) is not int:
        return None
    pairs = [*zip(modes, names, strict=False)][:own]
    return max((i for i, pair in enumerate(pairs) if pair == (STORES, name)), default=None)
