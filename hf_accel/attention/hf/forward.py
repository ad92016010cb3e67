"""The attention function: a backend of ours for what it understands, the model's own function for all else."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.hf import PAGED_HANDLE, PagedKV
from ...errors import UnsupportedError
from ...tensors import is_recorded, product_dtype
from .. import AttentionBackend, AttentionSpec, choose
from ..structure import CALL_KEYWORDS
from .mask import MaskInfo, expanded_mask, mask_info
from .stock import EAGER, collects_attentions, recorded_attention, stock_attention, stock_name

NAME = "hf_accel"
BACKEND_ATTRIBUTE = "_hf_accel_attention"  # the backend that patch() chose for an attention module

# Of attention, and what models pass on to all their layers for the sake of others.
KNOWN_KEYWORDS = CALL_KEYWORDS | {
    "cache_position", "labels", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "return_dict",
}  # fmt: skip


def attention_is_ours(config: Any) -> bool:
    """Whether a model with this config attends by "hf_accel"; a user may have set another implementation since."""
    return bool(config.get_text_config(decoder=True)._attn_implementation == NAME)


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

    What it does not understand goes to the function that the model has without us, which may return weights.
    """
    if is_recorded():
        info = mask_info(attention_mask)
        if info is not None and attention_mask is not None:  # made outside of what is compiled
            attention_mask = expanded_mask(attention_mask, info, query.shape[2])
        return recorded_attention(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    paged: PagedKV | None = getattr(key, PAGED_HANDLE, None)
    if paged is not None:
        paged.check_values(value)
    info = mask_info(attention_mask)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unknown = _unknown(module, attention_mask, info, causal, kwargs)
    if unknown is not None:
        if paged is not None:
            key, value = paged.columns(unknown)
        return stock_attention(
            module, query, key, value, attention_mask, info,
            dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs,
        )  # fmt: skip
    wanted = product_dtype(query)
    query, key, value = _in_one_dtype(query, key, value, wanted if paged is None else paged.storage.dtype)
    options: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux", kwargs.get("sinks")),
    }
    window = None if info is None else info.window
    backend = _backend(module, query, value, window, dropout, options, paged)
    if paged is not None:
        plain = info is not None or (attention_mask is None and causal)
        if plain and paged.contiguous and paged.window == window and not dropout:
            return _paged(backend, query, key, value, paged, window, options).to(wanted).contiguous(), None
        if info is not None:
            paged.check_window(window)
        key, value = paged.columns("it attends with a mask of its own, or drops weights")
    elif kwargs.get("cu_seq_lens_q") is not None and query.shape[0] == 1:
        return _packed(
            backend, query, key, value, causal or info is not None, kwargs, options | {"dropout": dropout}
        ).to(wanted), None
    mask = attention_mask
    if info is not None and attention_mask is not None:
        mask, causal = expanded_mask(attention_mask, info, query.shape[2]) if info.padded else None, True
    if window is not None and (mask is not None or window >= key.shape[2]):
        window = None
    out = backend.dense(
        query, key, value, mask=mask, causal=causal and mask is None, window=window, dropout=dropout, **options
    )
    return out.to(wanted).contiguous(), None


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """As torch's own attention does under autocast; and as pages are that were written in another dtype."""
    if query.dtype is key.dtype is value.dtype is dtype:
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _unknown(
    module: nn.Module, mask: Tensor | None, info: MaskInfo | None, causal: bool, kwargs: dict[str, Any]
) -> str | None:
    """What our attention does not understand of a call, as a clause; None if it understands all."""
    if not kwargs.keys() <= KNOWN_KEYWORDS:
        name = next((n for n in kwargs if n not in KNOWN_KEYWORDS and kwargs[n] is not None), None)
        if name is not None:
            return f"it is given {name}="
    if kwargs.get("output_attentions") or collects_attentions():
        return "it is asked for attention weights"
    if info is None:
        return None if mask is None or mask.ndim == 4 else f"it is given a mask of shape {tuple(mask.shape)}"
    # a module that is not causal, where stock's sdpa would go by that
    return None if causal or not info.left_out or stock_name(module) == EAGER else "it is not causal"


def _paged(
    backend: AttentionBackend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paged: PagedKV,
    window: int | None,
    options: Any,
) -> Tensor:
    """Attention of a forward pass over the pages; over K and V themselves where they are all there is."""
    step, group, storage = paged.step, paged.group_step, paged.storage
    if step.fresh and storage.k_scales is None:
        if step.rows is None:
            return backend.dense(query, key, value, mask=None, causal=True, window=window, **options)
        out = backend.packed(
            step.tokens(query), step.tokens(key), step.tokens(value),
            cu_q=step.cu_q, cu_k=step.cu_q, max_q=step.max_q, max_k=step.max_q, causal=True, window=window, **options,
        )  # fmt: skip
    else:
        out = backend.paged(
            step.tokens(query), storage.k_pages, storage.v_pages, storage.k_scales, storage.v_scales,
            group.block_table, step.cu_q, group.kv_len, step.max_q, group.max_kv, window=window, **options,
        )  # fmt: skip
    return step.columns(out, query.shape[0])


def _packed(
    backend: AttentionBackend, query: Tensor, key: Tensor, value: Tensor, causal: bool, kwargs: Any, options: Any
) -> Tensor:
    """Several sequences end to end in one row, told apart by cu_seq_lens (transformers' FlashAttentionKwargs)."""
    cu_q = kwargs["cu_seq_lens_q"]
    cu_k = kwargs.get("cu_seq_lens_k", cu_q)
    out = backend.packed(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1),
        cu_q=cu_q, cu_k=cu_k, max_q=int((cu_q[1:] - cu_q[:-1]).max()), max_k=int((cu_k[1:] - cu_k[:-1]).max()),
        causal=causal, window=kwargs.get("sliding_window"), **options,
    )  # fmt: skip
    return out.unsqueeze(0)


def _backend(
    module: nn.Module,
    query: Tensor,
    value: Tensor,
    window: int | None,
    dropout: float,
    options: dict[str, Any],
    paged: PagedKV | None,
) -> AttentionBackend:
    chosen: str = getattr(module, BACKEND_ATTRIBUTE, "auto")
    spec = AttentionSpec(
        dtype=query.dtype,
        device_type=query.device.type,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        num_heads=query.shape[1],
        num_kv_heads=value.shape[1],
        window=window,
        softcap=options["softcap"],
        sinks=options["sinks"] is not None,
        quantized_kv=paged is not None and paged.storage.k_scales is not None,
        dropout=dropout > 0,
    )
    return _choose(spec, chosen)


@lru_cache(maxsize=4096)
def _choose(spec: AttentionSpec, name: str) -> AttentionBackend:
    """The planned backend; another one for what it refuses: the model may have been given another dtype since."""
    try:
        return choose(spec, name)[0]
    except UnsupportedError:
        return choose(spec)[0]
