"""What a model's config says of its cache: layers, and their windows."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...config import CacheConfig
from ...errors import UnsupportedError
from ..group import PageGroup

NOT_PAGED = "use transformers' own cache"
REMADE = "make it with hf_accel.PagedCache(model.config)"
FIRST_TOKENS = 1024  # where a cache that grows begins, over all sequences
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each decoder layer, None for full attention, as transformers' own cache sees it.

    Raises UnsupportedError for layers that hold anything but keys and values of all, or of the last, tokens.
    """
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedError(f"config is a {type(config).__name__}; a PagedCache is made from model.config")
    decoder = config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(decoder, "layer_types", None) or ()):
        raise UnsupportedError(f"a paged cache cannot hold chunked attention layers; {NOT_PAGED}")
    windows: list[int | None] = []
    try:
        layers = DynamicCache(config=decoder).layers
    except (AttributeError, RuntimeError) as error:  # of a config that transformers makes no cache from either
        raise UnsupportedError(f"transformers makes no cache from a {type(decoder).__name__}; {NOT_PAGED}") from error
    for layer in layers:
        if type(layer) is DynamicLayer:
            windows.append(None)
        elif type(layer) is DynamicSlidingWindowLayer:
            windows.append(layer.sliding_window)
        else:
            raise UnsupportedError(f"a paged cache cannot hold a {type(layer).__name__}; {NOT_PAGED}")
    if not windows:
        raise UnsupportedError(
            f"{type(config).__name__} describes no decoder layers, and a paged cache needs some; {NOT_PAGED}"
        )
    return windows


def page_groups(
    config: PreTrainedConfig, settings: CacheConfig, *, capacity: int = FIRST_TOKENS
) -> tuple[list[PageGroup], list[int]]:
    """A PageGroup for each kind of layer, and the number of each layer's group. capacity: tokens to begin with."""
    windows = layer_windows(config)
    tokens = capacity if settings.max_tokens is None else settings.max_tokens
    kinds = list(dict.fromkeys(windows))
    groups = [
        PageGroup(
            window=window,
            num_blocks=max(1, -(-tokens // settings.block_size)),
            block_size=settings.block_size,
            growable=settings.max_tokens is None,
            prefix_sharing=settings.prefix_sharing,
            quantized=QUANTIZED.get(settings.dtype),
        )
        for window in kinds
    ]
    return groups, [kinds.index(window) for window in windows]


def check_windows(own: list[int | None], config: PreTrainedConfig) -> None:
    """Raise UnsupportedError unless a cache whose layers have these windows fits a model of this config."""
    wanted = layer_windows(config)
    if own != wanted:
        raise UnsupportedError(
            f"the PagedCache is for {_described(own)}, and the model has {_described(wanted)}; {REMADE}"
        )


def _described(windows: list[int | None]) -> str:
    kinds = dict.fromkeys("without a window" if w is None else f"with a window of {w}" for w in windows)
    return f"{len(windows)} layers {' and '.join(kinds)}"
