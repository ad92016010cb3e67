"""The form of a call of a layer or an encoder: its arguments, apart from the numbers in tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ..tensors import PLAIN
from .operation import UntraceableError
from .symbols import Opaque
from .unchanged import PLAIN_TYPES

MASK, TABLES, BIAS = "attention_mask", "position_embeddings", "position_bias"
POSITION_IDS = "position_ids"
CACHES = ("past_key_values", "cache", "layer_past", "cache_params")  # the names of a cache
CACHE = CACHES[0]
SOURCE_STATES, SOURCE_MASK = "encoder_hidden_states", "encoder_attention_mask"  # of a decoder that has an encoder
SOURCE_BIAS = "encoder_decoder_position_bias"  # what T5's decoder adds to the scores of an encoder's output: zeros
OF_SOURCE = (SOURCE_STATES, SOURCE_MASK, BIAS, SOURCE_BIAS)  # a decoder layer that has an encoder may be given these
# Of Gemma 3n and 4: what is added for each layer, [B, T, a few], and where layers leave keys and values for others.
OF_LAYER, SHARED_KEYS = "per_layer_input", "shared_kv_states"
OF_LAYERS = (OF_LAYER, SHARED_KEYS)
ALIBI = "alibi"  # of BLOOM, and of Falcon: None where it rotates queries and keys
BIASES = (BIAS, ALIBI)  # the names of a bias of positions that a model makes for all layers
TENSORS = (MASK, POSITION_IDS, TABLES, *CACHES, *OF_SOURCE, *OF_LAYERS, ALIBI)  # a decoder layer may be given these
STARTS = "cu_seqlens"  # where the sequences begin that are packed into one row, and the end of the last
PASSED_ON = (*TENSORS, STARTS)  # tensors, and a cache, that a layer may only pass on, as any other tensor


@dataclass(frozen=True)
class CallForm:
    """The arguments of a call, apart from the numbers in tensors.

    states: the name of the hidden states. tensors: those that are tensors. plain: the name, type and
    value of each other argument; True is not 1. table_dtype: of cos and sin, if they are given. in_rows: whether the
    states are [B, T, width]; else they are packed sequences, [T, width]. one_table: whether what has the name of cos
    and sin is one tensor.
    """

    states: str
    tensors: frozenset[str] = frozenset()
    plain: tuple[tuple[str, type, Any], ...] = ()
    table_dtype: torch.dtype | None = None
    in_rows: bool = True
    one_table: bool = False


def usual_form(kind: type[nn.Module], dtype: torch.dtype = torch.float32, others: Collection[str] = ()) -> CallForm:
    """Return the form of a call with hidden states, and with a mask, cos and sin of `dtype`, and others, if the code
    takes them.
    """
    usual = {MASK, TABLES, BIAS, *others}
    given = inspect.signature(kind.forward).parameters
    if STARTS in given and given[STARTS].default is inspect.Parameter.empty:
        usual.add(STARTS)
    tensors = frozenset(usual.intersection(parameter_names(kind.forward)))
    return CallForm(_states(kind), tensors, table_dtype=dtype if TABLES in tensors else None)


def usual_pass(
    kind: type[nn.Module], *, cache: str = CACHE, has_encoder: bool = False, has_bias: bool = False
) -> CallForm:
    """Return the form of a call of a decoder layer by transformers' models: with those of TENSORS that its code names,
    a cache among them.

    cache: the name of the cache for code that names none. has_encoder: whether the layer is given an encoder's output.
    has_bias: whether it is given one of BIASES. Raises UntraceableError if it is given other hidden states.
    """
    usual, names = {*TENSORS} - {ALIBI, *(() if has_encoder else OF_SOURCE)}, parameter_names(kind.forward)
    usual |= {*BIASES} if has_bias else set()
    other = [name for name in names[1:] if name.endswith("hidden_states") and name != SOURCE_STATES]
    if other:
        raise UntraceableError(f"it is given {other[0]} too, which no trace follows")
    named = usual.intersection(names)
    if named.isdisjoint(CACHES):
        named = usual - {*CACHES, *OF_SOURCE, *OF_LAYERS, *BIASES} | {cache}
    plain = (("use_cache", bool, True), *((name, type(None), None) for name in {*names} - named if name == ALIBI))
    return CallForm(_states(kind), frozenset(named), plain)


def _states(kind: type[nn.Module]) -> str:
    names = parameter_names(kind.forward)
    if not names:
        raise UntraceableError("it takes no hidden states")
    return names[0]


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
    tensors = frozenset(name for name, value in named.items() if _is_passed_on(name, value))
    plain = tuple((name, type(value), value) for name, value in named.items() if name not in tensors)
    if not all(issubclass(kind, PLAIN_TYPES) or _is_size(value) for _, kind, value in plain):
        return None
    table_dtype, one_table = None, False
    if TABLES in tensors:
        tables = named[TABLES]
        if type(tables) is tuple and list(map(type, tables)) == [torch.Tensor] * 2:
            table_dtype = tables[0].dtype
        elif type(tables) is torch.Tensor:
            one_table = True
        else:
            return None
    in_rows = STARTS not in tensors or getattr(x, "ndim", 3) == 3
    return x, mask, CallForm(names[0], tensors, plain, table_dtype, in_rows, one_table)


def _is_passed_on(name: str, value: object) -> bool:
    return (
        type(value) in PLAIN or isinstance(value, Opaque) or (name in PASSED_ON and not isinstance(value, PLAIN_TYPES))
    )


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


def as_usual(rotation: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a rotation would do the same without these arguments, because they have their usual values."""
    if not kwargs:
        return True
    usual = inspect.signature(rotation).parameters
    known = all(isinstance(value, PLAIN_TYPES) and name in usual for name, value in kwargs.items())
    return known and all(usual[name].default == value for name, value in kwargs.items())
