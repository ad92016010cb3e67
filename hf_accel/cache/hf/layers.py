"""The layers of a cache, and their sliding windows, from a model's config."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...config import CacheConfig
from ...errors import UnsupportedError
from ..group import PageGroup, SharedContext
from ..quantized import QUANTIZED

NOT_PAGED = "use transformers' own cache"
REMADE = "make it with hf_accel.PagedCache(model.config)"
FIRST_TOKENS = 1024  # the initial capacity, in tokens over all sequences, of a cache that grows


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Return the sliding window of each decoder layer, None for full attention, as in transformers' DynamicCache.

    Raises UnsupportedError for a layer that caches anything but the keys and values of all tokens or of the last
    ones.
    """
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedError(f"config is a {type(config).__name__}; a PagedCache is made from model.config")
    decoder = config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(decoder, "layer_types", None) or ()):
        raise UnsupportedError(f"a paged cache cannot hold chunked attention layers; {NOT_PAGED}")
    windows: list[int | None] = []
    try:
        layers = DynamicCache(config=decoder).layers
    except (AttributeError, RuntimeError) as error:
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
    config: PreTrainedConfig,
    settings: CacheConfig,
    *,
    capacity: int = FIRST_TOKENS,
    context: SharedContext | None = None,
) -> tuple[list[PageGroup], list[int]]:
    """Make a PageGroup for each sliding window, and return them with the index of each layer's group.

    capacity: the tokens that a growing cache has room for at first. context: the ranks that share out the blocks.
    """
    windows = layer_windows(config)
    tokens = capacity if settings.max_tokens is None else settings.max_tokens
    distinct_windows = list(dict.fromkeys(windows))
    groups = [
        PageGroup(
            window=window,
            num_blocks=max(1, -(-tokens // settings.block_size)),
            block_size=settings.block_size,
            growable=settings.max_tokens is None,
            prefix_sharing=settings.prefix_sharing,
            quantized=QUANTIZED.get(settings.dtype),
        )
        for window in distinct_windows
    ]
    for group in groups:
        group.context = context
    return groups, [distinct_windows.index(window) for window in windows]


def check_windows(own: list[int | None], config: PreTrainedConfig) -> None:
    """Raise UnsupportedError unless `own`, the windows of a cache's layers, are those of this config."""
    wanted = layer_windows(config)
    if own != wanted:
        raise UnsupportedError(
            f"the PagedCache is for {_described(own)}, and the model has {_described(wanted)}; {REMADE}"
        )


def _described(windows: list[int | None]) -> str:
    phrases = dict.fromkeys("without a window" if w is None else f"with a window of {w}" for w in windows)
    return f"{len(windows)} layers {' and '.join(phrases)}"
