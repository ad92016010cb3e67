"""The number of tokens that fit into a device's memory, for a cache that is made once and does not grow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ...config import CacheConfig
from ...errors import OutOfBlocksError
from ...hardware.device import pool_memory
from ...models import layers_config
from ..quantized import QUANTIZED
from .kinds import model_kinds

SPARE_SHARE = 0.05  # of the free memory, for what is not counted: fragments, and libraries
GRAPH_BYTES = 2**30
MOST_LOGITS = 512  # rows of a pass whose logits are computed


def fixed_settings(
    model: PreTrainedModel,
    settings: CacheConfig,
    device: torch.device,
    *,
    rows: int,
    drafts: Sequence[Any] = (),
    own_heads: Mapping[int, int] | None = None,
) -> CacheConfig:
    """The settings with a fixed max_tokens, where the device's memory is not committed by the system when it is used.

    There, pages that grew would need twice their memory while they are copied, and their addresses would change.
    rows: the tokens of the largest pass. drafts: draft models, which have pages for as many tokens. own_heads: see
    token_bytes.
    Raises OutOfBlocksError if too little memory is free.
    """
    free = pool_memory(device) if settings.max_tokens is None else None
    if free is None:
        return settings
    needed = round(free * SPARE_SHARE) + GRAPH_BYTES + pass_bytes(model, rows)
    per_token = token_bytes(model, settings, own_heads) + sum(token_bytes(draft, CacheConfig()) for draft in drafts)
    tokens = (free - needed) // per_token // settings.block_size * settings.block_size
    if tokens < settings.block_size:
        raise OutOfBlocksError(
            f"{free:,} bytes of {device} are free, of which passes need {needed:,}, and a block of the cache "
            f"{per_token * settings.block_size:,}; lower token_budget=, quantize the weights (patch(model, "
            "weights='int4')), free memory, or give max_tokens= (CacheConfig or Engine)"
        )
    return dataclasses.replace(settings, max_tokens=tokens)


def share_settings(
    model: PreTrainedModel,
    settings: CacheConfig,
    device: torch.device,
    *,
    rows: int,
    share: float,
    drafts: Sequence[Any] = (),
) -> CacheConfig:
    """The settings as of fixed_settings, where the cache takes at most `share` of the free memory.

    Nothing is changed where the user has said max_tokens, or where memory is committed only when it is used.
    """
    free = pool_memory(device) if settings.max_tokens is None else None
    if free is None:
        return settings
    size = settings.block_size
    tokens = int(free * share) // token_bytes(model, settings) // size * size
    fitting = fixed_settings(model, settings, device, rows=rows, drafts=drafts)
    return dataclasses.replace(fitting, max_tokens=max(size, min(tokens, fitting.max_tokens or tokens)))


def token_bytes(model: PreTrainedModel, settings: CacheConfig, own_heads: Mapping[int, int] | None = None) -> int:
    """Return the bytes of a token in the pages of all layers, except for states of fixed size.

    own_heads: the heads of K and V that this process has in each layer, where it is not all of them.
    """
    config: Any = layers_config(model.config)
    quantized, heads = QUANTIZED.get(settings.dtype), own_heads or {}
    layers = zip(model_kinds(model.config).layers, config.per_layer_config, strict=False)
    return sum(
        kind.numbers(layer).token_bytes(model.dtype, quantized, heads=heads.get(index))
        for index, (kinds, layer) in enumerate(layers)
        for kind in kinds
        if kind.holds_tokens
    )


def pass_bytes(model: PreTrainedModel, rows: int) -> int:
    """About the most memory that a pass of so many rows takes at a time: an MLP, and the processing of logits."""
    config: Any = layers_config(model.config)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widest = inner if isinstance(inner, int) else max(inner)
    size = model.dtype.itemsize
    logits = min(rows, MOST_LOGITS) * config.vocab_size * (size + 4 * 4)  # some float32 numbers for each
    return rows * (8 * config.hidden_size + 4 * widest) * size + logits
