"""The kinds of state that decoder layers keep of their tokens, from a model's config, and pages for each kind."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ...config import CacheConfig
from ...errors import UnsupportedError
from ..group import PageGroup, SharedContext
from ..once import OnceGroup
from ..quantized import QUANTIZED
from ..states import FIRST_STATES, MOST_STATES, WINDOW, StateGroup

NOT_PAGED = "use transformers' own cache"
REMADE = "make it with hf_accel.PagedCache(model.config)"
CONVOLVED_TOKENS = "conv_L_cache"  # the setting of LFM2 that says how many tokens its convolutions see
COMPRESSED_NUMBERS = "kv_lora_rank"  # the setting that says how many numbers stand for a token's keys and values
# The settings of layers with the gated delta rule.
RECURRENT_SETTINGS = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
FIRST_TOKENS = 1024  # the initial capacity, in tokens over all sequences, of a cache that grows


class LayerKind(NamedTuple):
    """The state that a decoder layer keeps of its tokens: keys and values, or one of the three below.

    window: the number of last tokens that it keeps; None for all. convolves: whether it keeps the inputs of a short
    convolution. recurs: whether it keeps a state of fixed size after a token. rank: the numbers that it keeps in place
    of a token's keys and values, and makes both from; None if it keeps these themselves.
    """

    window: int | None
    convolves: bool = False
    recurs: bool = False
    rank: int | None = None


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Return the window of each decoder layer, None for full attention. Raises what `layer_kinds` raises."""
    return [kind.window for kind in layer_kinds(config)]


def layer_kinds(config: PreTrainedConfig) -> list[LayerKind]:
    """Return what each decoder layer keeps, as in transformers' DynamicCache.

    Raises UnsupportedError for a layer that caches anything else.
    """
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedError(f"config is a {type(config).__name__}; a PagedCache is made from model.config")
    decoder = config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(decoder, "layer_types", None) or ()):
        raise UnsupportedError(f"a paged cache cannot hold chunked attention layers; {NOT_PAGED}")
    kinds: list[LayerKind] = []
    try:
        layers = DynamicCache(config=decoder).layers
    except (AttributeError, RuntimeError) as error:
        raise UnsupportedError(f"transformers makes no cache from a {type(decoder).__name__}; {NOT_PAGED}") from error
    for layer, name in zip(layers, layer_names(decoder, len(layers)), strict=False):
        kind = layer_kind(layer, name, decoder)
        if kind is None:
            raise UnsupportedError(f"a paged cache cannot hold a {type(layer).__name__}; {NOT_PAGED}")
        kinds.append(kind)
    if not kinds:
        raise UnsupportedError(
            f"{type(config).__name__} describes no decoder layers, and a paged cache needs some; {NOT_PAGED}"
        )
    return kinds


def layer_names(decoder: Any, count: int) -> list[str | None]:
    """Return what a decoder's config calls each of `count` layers; None where it has one kind alone."""
    return list(getattr(decoder, "layer_types", None) or [None] * count)


def layer_kind(layer: Any, name: str | None, decoder: Any) -> LayerKind | None:
    """Return what a layer of transformers' DynamicCache keeps; None if pages cannot hold it.

    name: what the decoder's config calls the layer.
    """
    rank = getattr(decoder, COMPRESSED_NUMBERS, None)
    if type(layer) is DynamicLayer:
        return LayerKind(None, rank=rank)
    if type(layer) is DynamicSlidingWindowLayer:
        return LayerKind(layer.sliding_window, rank=rank)
    window = getattr(decoder, CONVOLVED_TOKENS, None)
    if name == "linear_attention" and type(layer) is LinearAttentionLayer:
        return LayerKind(WINDOW, recurs=True) if all(hasattr(decoder, each) for each in RECURRENT_SETTINGS) else None
    if name == "conv" and type(layer) is LinearAttentionLayer and isinstance(window, int):
        return LayerKind(window, convolves=True)
    return None


def page_groups(
    config: PreTrainedConfig,
    settings: CacheConfig,
    *,
    capacity: int = FIRST_TOKENS,
    context: SharedContext | None = None,
) -> tuple[list[PageGroup], list[int]]:
    """Make a PageGroup for each kind of layer, and return them with the index of each layer's group.

    The last group of an encoder-decoder holds what its layers keep of the encoder's output.
    capacity: the tokens that a growing cache has room for at first. context: the ranks that share out the blocks.
    """
    kinds = layer_kinds(config)
    tokens = capacity if settings.max_tokens is None else settings.max_tokens
    # States come last, so that the first group has the blocks of a sequence's tokens, if there are any.
    distinct_kinds = sorted(dict.fromkeys(kinds), key=lambda kind: kind.recurs)
    num_blocks, growable = max(1, -(-tokens // settings.block_size)), settings.max_tokens is None
    groups = [
        StateGroup(
            num_blocks=FIRST_STATES if growable else most_states(num_blocks),
            growable=growable,
            prefix_sharing=settings.prefix_sharing,
        )
        if kind.recurs
        else PageGroup(
            window=kind.window,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            growable=growable,
            prefix_sharing=settings.prefix_sharing,
            quantized=None if kind.convolves else QUANTIZED.get(settings.dtype),
        )
        for kind in distinct_kinds
    ]
    for group, kind in zip(groups, distinct_kinds, strict=True):
        group.rank = kind.rank
    if config.is_encoder_decoder:
        groups.append(
            OnceGroup(
                window=None,
                num_blocks=num_blocks,
                block_size=settings.block_size,
                growable=growable,
                prefix_sharing=False,
                quantized=QUANTIZED.get(settings.dtype),
            )
        )
    for group in groups:
        group.context = context
    return groups, [distinct_kinds.index(kind) for kind in kinds]


def most_states(num_blocks: int) -> int:
    """Return the states for which a pool of fixed size has room, next to `num_blocks` blocks of keys and values.

    Each sequence has a block at least, and two states; drafts take more of them.
    """
    return WINDOW * num_blocks + MOST_STATES


def sharing_refusal(config: PreTrainedConfig) -> str | None:
    """Return why ranks cannot share out the pages of a model, as one clause; None if they can."""
    kinds = layer_kinds(config)
    if any(kind.convolves or kind.recurs for kind in kinds):
        return "layers that are no attention need all that they keep on each rank"
    if any(kind.rank is not None for kind in kinds):
        return "no rank knows how to attend over a part of the compressed keys"
    return None


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
