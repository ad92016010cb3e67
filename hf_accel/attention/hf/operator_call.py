"""Calls modules that attend by operators in a ragged pass, with stand-ins for their caches. See operator_pass.py."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from ...cache.hf import PAGED_HANDLE, RaggedEncoderDecoderCache
from ...errors import NotRaggedError
from ...recognition.code import with_functions
from ...recognition.operation import UntraceableError
from ...recognition.scores import AddedBias, Scores
from ...tensors import product_dtype
from ...undo.journal import original_class
from .cached_stand_ins import CachedKeys, CachedValues, HidingMask
from .forward import attention_forward
from .operator_pass import OperatorAttention, OperatorPass, WithoutCache
from .page_heads import PageHeads
from .stock import ATTENTION_NAME

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name under which code finds transformers' attention functions


class SourcePass(OperatorPass):
    """A cache for one call of a module that attends by operators to an encoder's output, all of which it sees.

    The mask of the call is not read: what it hides has no slots.
    """

    causal = False
    is_tried_whole = True

    @property
    def layers(self) -> SourcePass:
        return self

    def __getitem__(self, layer_idx: int) -> SourcePass:
        if self.layer_idx not in (None, layer_idx):
            raise UntraceableError("it reads its cache for more than one layer")
        self.layer_idx = layer_idx
        return self

    @property
    def keys(self) -> CachedKeys:
        """Return what stands for the keys that an earlier pass has stored."""
        assert self.layer_idx is not None
        keys = self.cache.layers[self.layer_idx].keys
        self.dtype = product_dtype(keys)
        return CachedKeys(self, keys)

    @property
    def values(self) -> CachedValues:
        return CachedValues(self, self.cache.layers[self.layer_idx].values)

    def _store(self, keys: Tensor, values: Tensor, heads: PageHeads) -> None:
        if not heads.is_plain:
            raise UntraceableError("it reads heads of an encoder's output in another order")
        handle = getattr(keys, PAGED_HANDLE, None)
        if handle is None:
            super()._store(keys, values, heads)
        else:
            self.heads, self.stored, self.paged = heads, values, handle


class PairedPass(EncoderDecoderCache):
    """The two caches for one call of a module that attends by operators in the decoder of an encoder-decoder."""

    def __init__(self, module: nn.Module, known: OperatorAttention, cache: RaggedEncoderDecoderCache) -> None:
        # super().__init__() is not called: it asks a cache of transformers how long each layer is.
        self.self_attention_cache: Any = OperatorPass(module, known, cache.self_attention_cache)
        self.self_attention_cache.is_tried_whole = True
        self.cross_attention_cache: Any = SourcePass(module, known, cache.cross_attention_cache)
        self.is_updated = cache.is_updated


def run_over_pages(
    module: nn.Module, known: OperatorAttention, cache: Any, given: dict[str, Any], *, forward: Any
) -> Any:
    """Call the forward of a module that attends by operators in a ragged pass.

    given: its arguments by name, of which the cache is one if it takes one. Raises NotRaggedError if it does what is
    not known.
    """
    own: OperatorPass | PairedPass
    if isinstance(cache, RaggedEncoderDecoderCache):
        own = PairedPass(module, known, cache)
        parts = [own.self_attention_cache, own.cross_attention_cache]
    else:
        own = OperatorPass(module, known, cache)
        own.is_tried_whole = known.unmasked
        parts = [own]
    named: dict[str, Any] = {name: own if value is cache else value for name, value in given.items()}
    if known.mask is not None and named.get(known.mask) is not None:
        named[known.mask] = mask = HidingMask(named[known.mask])
        for part in parts:
            part.mask = mask
    if known.bias is not None and isinstance(named.get(known.bias), Tensor):
        named[known.bias] = parts[0].bias = AddedBias(named[known.bias].shape)
    try:
        if known.implementation is not None:
            forward = MethodType(_with_ours(original_class(module).forward, known.implementation), module)
        with nullcontext() if known.layer is None else WithoutCache(parts[0]):
            result = forward(**named)
        used = [part.used for part in parts if part.used is not None]
        if len(used) != 1:
            raise UntraceableError("it does not attend, or attends more than once")
    except UntraceableError as error:
        raise NotRaggedError(
            f"{type(module).__name__} cannot read pages: {error}; patch this model with cache=None"
        ) from error
    if known.backend is None:
        known.spec = used[0]
    return without_weights(result)


@lru_cache(maxsize=256)
def _with_ours(forward: Any, implementation: str) -> Any:
    """Return a copy of a forward that finds our attention function instead of its own."""
    ours: Any = OurInterface(implementation)
    return with_functions(forward, {INTERFACE: ours})


def without_weights(result: Any) -> Any:
    """Return the result of attention with None instead of its weights, which nobody has computed."""
    if not isinstance(result, tuple):
        return result
    return tuple(None if isinstance(each, Scores) else each for each in result)


class OurInterface:
    """Stands for transformers' attention functions where the code of a module looks up its own."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation

    def __getitem__(self, name: str) -> Any:
        if name not in (self.implementation, ATTENTION_NAME):
            raise UntraceableError(f"its attention was set to {name!r}, and was {self.implementation!r}")
        return attention_forward

    def get_interface(self, name: str, default: Any = None) -> Any:
        return self[name]
