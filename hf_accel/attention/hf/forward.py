"""The attention function: a backend of ours for calls that it understands, the model's own function for others."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import output_capturing

from ...cache.hf import PAGED_HANDLE, PagedKV
from ...errors import UnsupportedError
from ...kernels.layouts import KV, AttentionOptions, Ragged
from ...recognition.cache_code import POSITION_BIAS
from ...recognition.code import CALL_KEYWORDS
from ...recognition.selected_code import SELECTED
from ...tensors import is_recorded, is_transformed, product_dtype
from ...undo.state import BACKEND_ATTRIBUTE
from .. import AttentionBackend, AttentionSpec, PlannedAttention, choose_backend
from ..second_derivative import differentiable_twice
from .bias import bias_over_pages
from .latents import expanded
from .mask import as_known, chunk_of, mask_forward, numbers_of
from .selected import RaggedSelection, attend_selected, masked, selectable
from .stock import (
    ATTENTION_NAME,
    EAGER,
    collects_attentions,
    name_before_patch,
    recorded_attention,
    replaced_function,
    stock_attention,
)

# The keywords of attention, and those that models pass to all layers though only other modules read them.
KNOWN_KEYWORDS = CALL_KEYWORDS | {
    "cache_position", "labels", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "return_dict",
}  # fmt: skip

BLIND = "padding attends to all tokens in its eager attention, and a loss may read what comes of it"
NOT_OURS = (
    "s_aux",
    "sinks",
    "cu_seq_lens_q",
    "output_attentions",
    "dropout",
)  # things that a traced layer's attention does not have


def register() -> None:
    """Make "hf_accel" an attention implementation; harmless when repeated.

    transformers calls the mask function once a forward pass and kind of layer, the attention function once a layer.
    """
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, mask_forward)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [B, Hq, Q, D], key and value [B, Hkv, T, D] -> [B, Q, Hq, Dv], contiguous, and no weights.

    A call that it does not understand goes to the model's original function, which may return weights.
    """
    paged: PagedKV | None
    if not isinstance(query, Tensor):  # a stand-in, with which the code of a layer is traced
        traced: Any = query.attended(
            module, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return traced
    if not isinstance(key, Tensor):  # stands for keys that a ragged pass reads in an order of their own
        found: Any = key.attended(
            module, query, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return found
    selection = kwargs.pop(SELECTED, None)
    if isinstance(selection, Tensor):
        paged = getattr(key, PAGED_HANDLE, None)
        num_keys = key.shape[2] if paged is None or attention_mask is None else attention_mask.shape[-1]
        attention_mask, selection = masked(attention_mask, selection, num_keys), None
    if is_transformed() and name_before_patch(module) == EAGER and not hasattr(key, PAGED_HANDLE):
        return stock_attention(
            module, query, KV(key, value), numbers_of(attention_mask),
            left_out=False, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs,
        )  # fmt: skip
    if is_recorded():
        mask = numbers_of(attention_mask)  # one of ours was made outside of what is compiled
        return recorded_attention(
            module, query, KV(key, value), mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    paged = getattr(key, PAGED_HANDLE, None)
    if paged is not None:
        paged.check_values(value)
        bias = None if kwargs.get(POSITION_BIAS) is None else bias_over_pages(module, kwargs.pop(POSITION_BIAS), paged)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    ours = as_known(attention_mask)
    if ours is not None and (query.shape[2] == 1 or _follows_the_step(module, paged)):
        causal = True  # a last token sees all others
    elif attention_mask is None and _follows_the_step(module, paged):
        causal = paged.layer.cache.unmasked or causal  # type: ignore[union-attr]
    elif attention_mask is None and paged is None and name_before_patch(module) == EAGER:
        causal = False  # without a mask it hides nothing, whatever the module says
    dense = None if paged is not None else (query, key, value)
    unknown = _unknown(module, attention_mask, dense, causal=causal, kwargs=kwargs)
    if unknown is not None:
        if paged is not None:
            key, value = _columns(module, paged, unknown)
        return stock_attention(
            module, query, KV(key, value), numbers_of(attention_mask),
            left_out=ours is not None and ours.meaning.left_out,
            dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs,
        )  # fmt: skip
    wanted = product_dtype(query)
    query, key, value = _in_one_dtype(query, key, value, wanted if paged is None else paged.storage.dtype)
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=causal or ours is not None,
        window=None if ours is None else ours.meaning.window,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux", kwargs.get("sinks")),
        dropout=dropout,
        bias=None if paged is None else bias,
    )
    if paged is not None and paged.layer.attends_to_all:
        backend = _backend(module, query, value, options, paged=paged)
        return _over_source(backend, query, options, paged=paged).to(wanted), None
    if paged is not None and selection is not None and not selection.is_all:
        return _selected(module, query, options, paged=paged, selection=selection, mask=attention_mask), None
    if paged is not None:
        chunk = chunk_of(attention_mask)
        plain = ours is not None or chunk is not None or (attention_mask is None and causal)
        seen = (options.window, None) if chunk is None else (chunk, chunk)
        if plain and paged.contiguous and (paged.window, paged.chunk) == seen and not dropout:
            options = options._replace(causal=True)
            return _paged(module, query, KV(key, value), options, paged=paged).to(wanted).contiguous(), None
        if ours is not None or chunk is not None:
            paged.check_window(options.window or chunk)
        key, value = _columns(module, paged, "it attends with a mask of its own, or drops weights")
    backend = _backend(module, query, value, options, paged=paged)
    if paged is None and kwargs.get("cu_seq_lens_q") is not None and query.shape[0] == 1:
        return _packed(backend, query, KV(key, value), options, kwargs=kwargs).to(wanted), None
    mask = None if ours is not None and not ours.meaning.padded else numbers_of(attention_mask)
    if ours is not None and ours.seen < key.shape[2]:  # no query sees the rest of a static cache
        key, value = key[:, :, : ours.seen], value[:, :, : ours.seen]
        mask = None if mask is None else mask[..., : ours.seen]
    if len(query) != len(key):  # one of them is for all rows of the other: queries that were learned
        query, key, value = _in_one_batch(query, key, value)
    if mask is not None:
        options = options._replace(causal=False, window=None)
    elif options.window is not None and options.window >= key.shape[2]:
        options = options._replace(window=None)
    out = backend.dense(query, KV(key, value), options, mask=mask)
    if paged is None and name_before_patch(module) == EAGER:
        out = differentiable_twice(out, query, KV(key, value), options, mask=mask)
    return out.to(wanted).contiguous(), None


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Convert all three to `dtype`: torch's attention does so under autocast, and pages may have another dtype."""
    if query.dtype is key.dtype is value.dtype is dtype:
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _in_one_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Repeat tensors of one row, as torch's operators would, for as many rows as the others have."""
    rows = max(map(len, tensors))
    return tuple(x.expand(rows, -1, -1, -1).contiguous() for x in tensors)


def _unknown(
    module: nn.Module,
    mask: Tensor | None,
    dense: tuple[Tensor, Tensor, Tensor] | None,
    *,
    causal: bool,
    kwargs: dict[str, Any],
) -> str | None:
    """Return what our attention does not understand of a call, as a clause; None if it understands all.

    dense: query, key and value of a call without pages.
    """
    if (replaced := replaced_function(module)) is not None:
        return f"others have replaced {replaced}"
    if dense is not None and dense[1].shape[1] != dense[2].shape[1]:
        return f"it is given {dense[2].shape[1]} heads of values for {dense[1].shape[1]} of keys"
    if not kwargs.keys() <= KNOWN_KEYWORDS:
        name = next((n for n in kwargs if n not in KNOWN_KEYWORDS and kwargs[n] is not None), None)
        if name is not None:
            return f"it is given {name}="
    if kwargs.get("output_attentions") or (output_capturing._active_collector.get() and collects_attentions()):
        return "it is asked for attention weights"
    ours = as_known(mask)
    # Stock's sdpa counts the keys that a query sees from the first, and ours from the last.
    if mask is None and dense is not None and causal and 1 < dense[0].shape[2] != dense[1].shape[2]:
        return "it attends causally to another number of keys than it has queries"
    if ours is None:
        return None if mask is None or mask.ndim == 4 else f"it is given a mask of shape {tuple(mask.shape)}"
    if dense is not None and (dense[0].shape[2], dense[1].shape[2]) != ours.lengths:
        return f"it is given a mask of {ours.lengths[1]} columns for {dense[1].shape[2]}"
    if name_before_patch(module) == EAGER:
        return BLIND if dense is not None and ours.has_blind_queries else None
    # a module that is not causal, where stock's sdpa would follow is_causal
    return None if causal or not ours.meaning.left_out else "it is not causal"


def _columns(module: Any, paged: PagedKV, why: str) -> tuple[Tensor, Tensor]:
    """Return PagedKV.columns, of compressed keys the keys and values that the module makes of them."""
    key, value = paged.columns(why)
    return (key, value) if paged.rank is None else module.expand_kv(key, value)


def _paged(module: nn.Module, query: Tensor, kv: KV, options: AttentionOptions, *, paged: PagedKV) -> Tensor:
    """Compute attention of a forward pass over the pages, or over K and V themselves without earlier tokens."""
    if paged.rank is not None:
        return _compressed(module, query, options, paged=paged)
    backend = _backend(module, query, kv.v, options, paged=paged)
    step, ragged, pages = paged.step, paged.group_step.ragged, paged.storage.pages
    context = paged.layer.group.context
    if context is not None:
        out = context.attend(backend, step.tokens(query), pages, step=paged.group_step, options=options)
    elif not step.fresh or pages.k_scales is not None or paged.chunk is not None:
        out = backend.paged(step.tokens(query), pages, ragged, options)
    elif step.token_columns is None:
        return backend.dense(query, kv, options)
    else:
        ragged = ragged._replace(block_table=None)  # a fresh pass has all keys with it
        out = backend.packed(step.tokens(query), KV(step.tokens(kv.k), step.tokens(kv.v)), ragged, options)
    return step.columns(out, query.shape[0])


def _compressed(module: Any, query: Tensor, options: AttentionOptions, *, paged: PagedKV) -> Tensor:
    """Compute attention of a forward pass over pages of compressed keys."""
    step, ragged, q = paged.step, paged.group_step.ragged, paged.step.tokens(query)
    parts = module.expansion(q.dtype, ragged)
    if parts is None:  # the layer's own code makes the keys and values of all tokens
        kv = expanded(module, paged.held())
        backend = _backend(module, query, kv.v.transpose(0, 1)[None], options, paged=None)
        out = backend.packed(q, kv, ragged._replace(block_table=None), options)
    else:
        absorbed, pages = parts.queries(q), paged.pages
        backend = _backend(module, absorbed.transpose(0, 1)[None], pages.v, options, paged=paged)
        out = parts.results(backend.paged(absorbed, pages, ragged, options))
    return step.columns(out, query.shape[0])


def _follows_the_step(module: nn.Module, paged: PagedKV | None) -> bool:
    """Return whether a module that is not causal was so when it was planned, and a pass says what its tokens see.

    The plan has read from stock's masks what they see, or has tried it, which is before there is a plan.
    """
    planned: PlannedAttention | None = vars(module).get(BACKEND_ATTRIBUTE)
    says = paged is not None and paged.layer.says_what_is_seen
    return says and (planned is None or not planned.is_causal)


def _selected(
    module: nn.Module, query: Tensor, options: AttentionOptions, *, paged: PagedKV, selection: RaggedSelection,
    mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute attention of a ragged pass over the tokens of a selection."""

    kv = selectable(module, paged, options, mask)
    backend = _backend(module, query, kv.v.transpose(0, 1)[None], options, paged=None)
    out = attend_selected(backend, query, kv, paged=paged, options=options, selection=selection)
    return out.to(query.dtype).contiguous()


def _over_source(backend: AttentionBackend, query: Tensor, options: AttentionOptions, *, paged: PagedKV) -> Tensor:
    """Compute attention over all stored keys of each token's sequence, those of an encoder's output.

    The mask of the call is not read: what it hides has no slots.
    """
    step = paged.step
    out = backend.paged(
        step.tokens(query), paged.storage.pages, paged.group_step.ragged, options._replace(causal=False)
    )
    return step.columns(out, query.shape[0]).contiguous()


def _packed(
    backend: AttentionBackend, query: Tensor, kv: KV, options: AttentionOptions, *, kwargs: dict[str, Any]
) -> Tensor:
    """Compute several sequences in one row, which cu_seq_lens separates (transformers' FlashAttentionKwargs)."""
    cu_q = kwargs["cu_seq_lens_q"]
    q_len, kv_len = cu_q.diff(), kwargs.get("cu_seq_lens_k", cu_q).diff()
    ragged = Ragged(cu_q, kv_len, int(q_len.max()), int(kv_len.max()))
    tokens, own = (x[0].transpose(0, 1) for x in (kv.k, kv.v)), options._replace(window=kwargs.get("sliding_window"))
    return backend.packed(query[0].transpose(0, 1), KV(*tokens), ragged, own).unsqueeze(0)


def _backend(
    module: nn.Module, query: Tensor, value: Tensor, options: AttentionOptions, *, paged: PagedKV | None
) -> AttentionBackend:
    """Return the planned backend if the call fits the plan; the model may have another dtype by now, for example."""
    planned: PlannedAttention | None = getattr(module, BACKEND_ATTRIBUTE, None)
    quantized_kv = paged is not None and paged.storage.pages.k_scales is not None
    if planned is not None:
        spec = planned.spec
        if (
            spec.dtype is query.dtype
            and spec.device_type == query.device.type
            and (spec.num_heads, spec.head_dim) == query.shape[1::2]
            and (spec.num_kv_heads, spec.value_dim) == value.shape[1::2]
            and spec.window == options.window
            and spec.softcap == options.softcap
            and spec.sinks is (options.sinks is not None)
            and spec.quantized_kv is quantized_kv
            and not options.dropout
            and spec.bias is (options.bias is not None)
        ):
            return planned.backend
    spec = AttentionSpec(
        dtype=query.dtype,
        device_type=query.device.type,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        num_heads=query.shape[1],
        num_kv_heads=value.shape[1],
        window=options.window,
        softcap=options.softcap,
        sinks=options.sinks is not None,
        quantized_kv=quantized_kv,
        dropout=options.dropout > 0,
        bias=options.bias is not None,
    )
    if planned is None:
        return _choose(spec, "auto", row_invariant=False)
    return choose_again(spec, planned.backend)


def choose_again(spec: AttentionSpec, planned: AttentionBackend) -> AttentionBackend:
    """Return the backend for a call that does not fit the plan: one of the same name if that serves."""
    return _choose(spec, planned.name, row_invariant=planned.row_invariant)


@lru_cache(maxsize=4096)
def _choose(spec: AttentionSpec, name: str, *, row_invariant: bool) -> AttentionBackend:
    """Return the backend of this name, or another one for a spec that it refuses."""
    try:
        return choose_backend(spec, name, row_invariant=row_invariant)[0]
    except UnsupportedError:
        return choose_backend(spec, row_invariant=row_invariant)[0]
