"""Attention over pages for code that computes it by torch's operators, and not by transformers' attention functions.

The code gets stand-ins for the keys and values that it takes from the cache, for its mask and for its bias of
positions. It does with them what it does with tensors, and where it multiplies values by weights, a backend attends
over the pages. What is not known raises UntraceableError; see operator_call.py.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from ...cache.hf import PAGED_HANDLE, PagedKV
from ...kernels.layouts import KV, AttentionOptions, PositionBias
from ...recognition.operation import UntraceableError
from ...recognition.scores import PRODUCTS, AddedBias, Scores
from ...tensors import product_dtype
from .. import AttentionBackend, AttentionSpec, ReferenceBackend
from ..masking import visible
from .cached_stand_ins import Cached, CachedKeys, CachedValues, HidingMask
from .forward import KNOWN_KEYWORDS, choose_again
from .page_heads import PageHeads, Pairs, page_heads, shared_out

# The keywords of an attention function that change what is computed.
ATTENDS_OTHERWISE = ("dropout", "softcap", "s_aux", "sinks", "sliding_window", "cu_seq_lens_q", "output_attentions")
LOW = -1e4  # what code without a cache adds to the scores of hidden keys
ONE_COLUMN = 1  # the number of keys that code reads: it makes masks and biases as large as that


@dataclass
class OperatorAttention:
    """The facts about a module that attends by operators.

    spec: of its attention. backend: None while it is tried. mask, bias: the names of the parameters of its forward
    that take its mask and its bias of positions. masks_biased: whether the mask has the bias in it already.
    layer: its number among the layers, if its code takes no cache, and multiplies queries by the keys of a pass alone;
    None for any other. implementation: the name of the attention function of transformers' interface that it calls,
    where a ragged pass calls ours; None where it calls none, or ours is set. unmasked: whether a trial has shown what
    tokens see where its code is given no mask: those before them, and prompts all of themselves.
    """

    spec: AttentionSpec | None
    backend: AttentionBackend | None
    mask: str | None
    bias: str | None
    masks_biased: bool = False
    layer: int | None = None
    implementation: str | None = None
    unmasked: bool = False
    _windows: dict[int, tuple[Any, int, int | None]] = field(default_factory=dict)

    def window_in(self, buffer: Tensor) -> int | None:
        """Return the window of a mask that a module keeps, [1, 1, M, M] of bool, or of ones and zeros; None for all
        tokens before.

        Raises UntraceableError for any other mask. Its numbers are read again when they have changed.
        """
        known = self._windows.get(id(buffer))
        if known is not None and known[0]() is buffer and known[1] == buffer._version:
            return known[2]
        shown = buffer.bool()
        if buffer.ndim != 4 or buffer.shape[:2] != (1, 1) or not torch.equal(shown.to(buffer.dtype), buffer):
            raise UntraceableError("it chooses scores by another condition than a mask")
        places, last = torch.arange(buffer.shape[-1], device=buffer.device), int(shown[0, 0, -1].sum())
        window = last if last < buffer.shape[-1] else None
        if not torch.equal(shown[0, 0], visible(places, places, causal=True, window=window)):
            raise UntraceableError("the mask that it keeps is not that of causal attention")
        self._windows[id(buffer)] = weakref.ref(buffer), buffer._version, window
        return window

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_windows": {}}


class WithoutCache(TorchFunctionMode):
    """Sees where code that has no cache multiplies queries by keys, and gives it scores over the pages of a pass."""

    def __init__(self, own: OperatorPass) -> None:
        super().__init__()
        self.own = own

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in PRODUCTS and self.own.layer_idx is None and all(map(_is_computed, args)):
            query, keys = args
            return self.own.begin(keys.transpose(-1, -2)).scores_of(query)
        return function(*args, **(kwargs or {}))


class OperatorPass:
    """A cache for one call of a module that attends by operators, in a ragged pass.

    used: what the call asked of its backend; None as long as it did not attend.
    """

    mask_hides = True
    causal = True
    is_tried_whole = False  # whether a trial of the model shows what a token sees that is given no mask

    def __init__(self, module: nn.Module, known: OperatorAttention, cache: Any) -> None:
        self.module, self.known, self.cache = module, known, cache
        self.mask = HidingMask()
        self.columns = ONE_COLUMN
        self.window: int | None = None
        self.bias: AddedBias | None = None
        self.used: AttentionSpec | None = None
        self.layer_idx: int | None = None
        self._attended: Any = None  # queries, options, where their keys stand, and what attention over the pages gave

    # -- what the code asks of its cache -----------------------------------------------------------------

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[CachedKeys, CachedValues]:
        if self.layer_idx is not None:
            raise UntraceableError("it updates its cache more than once")
        self.layer_idx, self.dtype = layer_idx, product_dtype(keys)
        return CachedKeys(self, keys), CachedValues(self, values)

    def begin(self, keys: Tensor) -> CachedKeys:
        """Take the keys [1, H, N, D] of code that has no cache."""
        self.layer_idx, self.dtype, self.columns = self.known.layer, product_dtype(keys), keys.shape[-2]
        return CachedKeys(self, keys)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UntraceableError(f"it reads {name} of its cache")

    # -- what the code does with its scores --------------------------------------------------------------

    def choose(self, condition: Any, scores: Scores, other: Any) -> Scores:
        """Return the scores where a mask that the module keeps is True, and the lowest number elsewhere."""
        buffer = next((b for b in self.module._buffers.values() if _shares(b, condition)), None)
        lowest = isinstance(other, Tensor) and other.ndim == 0 and float(other) <= torch.finfo(torch.float16).min
        if buffer is None or not lowest or self.window is not None:
            raise UntraceableError("it chooses scores by another condition than a mask")
        self.window = self.known.window_in(buffer)
        return scores if scores.is_masked else scores + self.mask

    def keep(self, scores: Scores, kept: Tensor, others: Tensor) -> Scores:
        """Return the scores where a mask that the module keeps is 1; others: a low number where it is 0.

        That is -10,000 in the first models of this kind. Scores that are far above it have no use of what it hides.
        """
        buffer = next((b for b in self.module._buffers.values() if _shares(b, kept)), None)
        low = others.min()
        if buffer is None or self.window is not None or not (low <= LOW or bool(kept.all())):
            raise UntraceableError("it multiplies scores by more than a number")
        if not torch.equal(others, low * (1 - kept)):
            raise UntraceableError("it adds something else to scores than a mask and a bias")
        self.window = self.known.window_in(buffer)
        return scores + self.mask

    def attend_as_sdpa(self, query: Tensor, keys: Any, values: Any, **given: Any) -> Tensor:
        """Attend as torch's scaled_dot_product_attention does with the mask of the call, or with is_causal."""
        mask, scale = given.pop("attn_mask", None), given.pop("scale", None)
        masked = mask is self.mask or given.pop("is_causal", False) is True
        if (mask is not None and not masked) or any(given.values()):
            raise UntraceableError("it attends with a mask of its own, or drops weights")
        scores = keys.scores_of(query) * float(query.shape[-1] ** -0.5 if scale is None else scale)
        return self.attend_by((scores + self.mask if masked else scores).softmax(-1), values)

    def attend_by(self, scores: Scores, values: Any) -> Tensor:
        """Attend over the pages; returns [1, H, N, Dv], or [H, N, Dv] for values without the first dimension."""
        if not (scores.is_masked or self.is_tried_whole) or self.used is not None:
            raise UntraceableError("it attends without a mask, or more than once")
        if self.known.layer is not None and isinstance(values, Tensor) and values.ndim == 4:
            values = CachedValues(self, values)
        query = scores.query.reshape(1, -1, *scores.query.shape[-2:])
        options = AttentionOptions(
            scores.factor, causal=self.causal, window=self.window, bias=self._bias_of(scores)
        )  # fmt: skip
        out = self._attend(query, scores.key, values, options)
        return out[0] if values.flat else out

    def attend_as_interface(
        self, module: nn.Module, query: Tensor, kv: KV, mask: Any, *, scaling: float | None = None, **given: Any
    ) -> Tensor:
        """Attend as our attention function does in a ragged pass of a causal module; returns [1, N, Hq, Dv].

        Code may call it more than once with the same queries and keys, and other values.
        """
        causal = given.pop("is_causal", None)
        hides = (
            (getattr(module, "is_causal", True) if causal is None else causal) if mask is None else mask is self.mask
        )
        _refuse_others(given, hides=hides or (mask is None and self.is_tried_whole))
        options = AttentionOptions(query.shape[-1] ** -0.5 if scaling is None else scaling, causal=self.causal)
        return self._attend(query, kv.k, kv.v, options).transpose(1, 2).contiguous()

    def attend_in_part(
        self, query: Tensor, kv: Any, mask: Any, *, scaling: float | None = None, **given: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend to one of two caches to whose tokens code attends at once; returns [1, N, Hq, Dv], and [1, N, Hq],
        the log-sum-exp of the scores.
        """
        _refuse_others(given, hides=mask is self.mask)
        keys, values = kv[:2]
        if not _are_of(self, keys, values) or self._attended is not None:
            raise UntraceableError("it attends to other keys or values than those of its cache, or more than once")
        self._attended = query, None, None, None
        plain = tuple(range(keys.tensor.shape[1]))
        if not keys.heads == values.heads == plain:
            raise UntraceableError("it joins heads of two caches in another order")
        self._store(keys.tensor, values.tensor, page_heads(Pairs(plain, plain), len(plain)))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        window = self.paged.window if self.causal else None
        return self._lse_over_pages(query, AttentionOptions(scale, causal=self.causal, window=window))

    def _attend(self, query: Tensor, keys: Any, values: Any, options: AttentionOptions) -> Tensor:
        """Attend over the pages with queries [1, Hq, N, D]; returns [1, Hq, N, Dv]."""
        if not _are_of(self, keys, values):
            raise UntraceableError("it attends to other keys or values than those of its cache")
        if keys.zeros:
            query = query[..., : -keys.zeros]
        count = query.shape[1]
        pairs = Pairs(shared_out(keys.heads, count), shared_out(values.heads, count))
        if self._attended is None:
            self._store(keys.tensor, values.tensor, page_heads(pairs, keys.tensor.shape[1]))
        reading = self.heads.reading(pairs)
        if self._attended is None:
            out = self._over_pages(reading.queries(query), options)
            self._attended = query, options, reading.slots.keys, out
        asked, known, slots, out = self._attended
        if asked is not query or known != options or slots != reading.slots.keys:
            raise UntraceableError("it attends more than once, and not with the same weights")
        results = reading.results(out)
        return pad(results, (0, values.zeros)) if values.zeros else results

    def _store(self, keys: Tensor, values: Tensor, heads: PageHeads) -> None:
        """Write the keys and values of the pass to the pages, with the heads that are read together in one."""
        assert self.layer_idx is not None
        self.heads = heads
        keys, self.stored = self.cache.update(heads.stored(keys), heads.stored(values), self.layer_idx)
        self.paged: PagedKV = getattr(keys, PAGED_HANDLE)

    def _over_pages(self, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attend over the pages; returns [1, H, N, Dv] of their wider heads, where they have these."""
        step, spec = self.paged.step, self._spec(query, options)
        self.used = spec
        self.paged.check_values(self.stored)
        tokens = step.tokens(query.to(self.dtype))
        out: Tensor = self._backend(spec).paged(
            tokens, self.paged.storage.pages, self.paged.group_step.ragged, options
        )
        return step.columns(out, 1).transpose(1, 2)

    def _lse_over_pages(self, query: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        step, spec = self.paged.step, self._spec(query, options)
        self.used = spec if self.causal else None  # what stands for the module is its attention to tokens
        self.paged.check_values(self.stored)
        tokens, pages = step.tokens(query.to(self.dtype)), self.paged.storage.pages
        ragged = self.paged.group_step.ragged
        out, lse = self._backend(spec).paged(tokens, pages, ragged, options, return_lse=True)
        return step.columns(out, 1), lse[None]

    def _backend(self, spec: AttentionSpec) -> AttentionBackend:
        """Return the planned backend, or another if the model has another dtype by now, for example."""
        planned = self.known.backend
        if planned is None:
            return ReferenceBackend()
        return planned if spec == self.known.spec else choose_again(spec, planned)

    def _bias_of(self, scores: Scores) -> PositionBias | None:
        if not scores.is_biased and not (self.known.masks_biased and scores.is_masked):
            return None
        bias: PositionBias | None = self.cache.bias
        if bias is None:
            raise UntraceableError("it adds a bias that is not known")
        return bias

    def _spec(self, query: Tensor, options: AttentionOptions) -> AttentionSpec:
        pages = self.paged.storage.pages
        return AttentionSpec(
            dtype=self.dtype, device_type=query.device.type, head_dim=query.shape[-1],
            value_dim=self.stored.shape[-1], num_heads=query.shape[1], num_kv_heads=self.stored.shape[1],
            window=options.window, quantized_kv=pages.k_scales is not None, bias=options.bias is not None,
        )  # fmt: skip


def _refuse_others(given: dict[str, Any], *, hides: bool) -> None:
    """Raise UntraceableError for keywords of attention that change what is computed, or a mask that is not known."""
    read = KNOWN_KEYWORDS - {*ATTENDS_OTHERWISE}
    if not hides or any(name not in read and _is_given(value) for name, value in given.items()):
        raise UntraceableError("it attends in another way than causally")


def _are_of(own: OperatorPass, keys: Any, values: Any) -> bool:
    """Return whether keys and values are those of one pass's cache."""
    return all(isinstance(each, Cached) and each.own is own for each in (keys, values))


def _is_computed(x: Any) -> bool:
    """Return whether x can be the queries or keys of attention, [B, H, N, D]."""
    return isinstance(x, Tensor) and x.ndim == 4 and not isinstance(x, nn.Parameter)


def _is_given(value: Any) -> bool:
    """Return whether a keyword of attention asks for something."""
    return isinstance(value, Tensor) or bool(value)


def _shares(buffer: Tensor | None, other: Any) -> bool:
    """Return whether a tensor is a part of a buffer."""
    if buffer is None or not isinstance(other, Tensor):
        return False
    return buffer.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
