"""Attention and mask functions, registered with transformers as a pair under one name.

transformers calls the mask function once a forward pass and kind of layer, the attention function once a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ..cache.hf import PAGED_HANDLE, PagedKV
from ..errors import UnsupportedError
from ..kernels.cpu.tensors import is_recorded, product_dtype
from . import AttentionBackend, AttentionSpec, choose

NAME = "hf_accel"
BACKEND_ATTRIBUTE = "_hf_accel_attention"  # the backend that patch() chose for an attention module
_INFO = "_hf_accel_mask"


@dataclass
class MaskInfo:
    """What a 2-D mask [B, T] stands for: causal attention, within `window`, to columns that are not padding."""

    window: int | None
    padded: bool
    expanded: Tensor | None = None


def register() -> None:
    """Make "hf_accel" an attention implementation; harmless when repeated."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_forward)


def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """None for plain causal attention, a 2-D mask that carries a MaskInfo, or a 4-D bool mask for all else."""
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if (
        is_recorded()
        or not (allow_is_causal_skip and aligned)
        or getattr(config, "attention_chunk_size", None) is not None
    ):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            config=config,
            **kwargs,
        )
    window = local_size if local_size is not None and kv_length > local_size else None
    columns = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length]
    padded = columns is not None and not bool(columns.all())
    if window is None and not padded:
        return None
    if not padded or columns is None:
        columns = torch.ones(batch_size, kv_length, dtype=torch.bool, device=kwargs.get("device"))
    mask = columns.view_as(columns)  # a tensor of our own: the note must not stick to the user's mask
    setattr(mask, _INFO, MaskInfo(window, padded))
    return mask


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
) -> tuple[Tensor, None]:
    """query [B, Hq, Q, D], key and value [B, Hkv, T, D] -> [B, Q, Hq, Dv] and no weights."""
    if is_recorded():
        if attention_mask is not None and attention_mask.ndim == 2:  # made outside of what is compiled
            attention_mask = _expanded(attention_mask, getattr(attention_mask, _INFO), query.shape[2])
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    _refuse_unknown(kwargs)
    paged: PagedKV | None = getattr(key, PAGED_HANDLE, None)
    wanted = product_dtype(query)
    query, key, value = _in_one_dtype(query, key, value, wanted if paged is None else paged.storage.dtype)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    info = _mask_info(attention_mask)
    options: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux", kwargs.get("sinks")),
    }
    window = info.window if info is not None else None
    if paged is not None:
        paged.layer.cache.unread = None
        window = paged.layer.group.window if window is None else window
    backend = _backend(module, query, value, window, dropout, options, paged)
    if paged is not None and paged.contiguous and causal and (attention_mask is None or info is not None):
        return _paged(backend, query, key, value, paged, window, options).to(wanted), None
    if paged is not None:
        key, value = paged.columns()
    elif kwargs.get("cu_seq_lens_q") is not None and query.shape[0] == 1:
        return _packed(backend, query, key, value, causal, kwargs, options | {"dropout": dropout}).to(wanted), None
    mask = attention_mask
    if info is not None and attention_mask is not None:
        mask = _expanded(attention_mask, info, query.shape[2]) if info.padded else None
    out = backend.dense(
        query, key, value, mask=mask, causal=causal and mask is None, window=window if mask is None else None,
        dropout=dropout, **options,
    )  # fmt: skip
    return out.to(wanted), None


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """As torch's own attention does under autocast; and as pages are that were written in another dtype."""
    if query.dtype is key.dtype is value.dtype is dtype:
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


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


def _mask_info(mask: Tensor | None) -> MaskInfo | None:
    if mask is None or mask.ndim == 4:
        return None
    info = getattr(mask, _INFO, None)
    if info is None:
        raise UnsupportedError(
            f"attention 'hf_accel' got a mask of shape {tuple(mask.shape)} that is not from its own mask function; "
            "pass a 4-D mask, or none"
        )
    return info


def _expanded(mask: Tensor, info: MaskInfo, q_length: int) -> Tensor:
    """The 4-D mask [B, 1, Q, T] of a 2-D one, made once a forward pass."""
    if info.expanded is None:
        columns = torch.arange(mask.shape[1], device=mask.device)
        queries = columns[-q_length:, None]
        visible = columns <= queries
        if info.window is not None:
            visible &= columns > queries - info.window
        info.expanded = visible & mask[:, None, None, :]
    return info.expanded


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name in ("position_bias", "indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"attention 'hf_accel' cannot apply {name}=; use attn_implementation='sdpa'")
    if kwargs.get("output_attentions"):
        raise UnsupportedError("attention 'hf_accel' returns no weights; use attn_implementation='eager' for them")


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
