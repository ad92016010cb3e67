"""The kinds of state that decoder layers keep of their tokens, from a model's config, and pages for each kind."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ...config import CacheConfig
from ...errors import UnsupportedError
from ..group import PageGroup, SharedContext
from ..once import OnceGroup
from ..quantized import QUANTIZED
from ..states import FIRST_STATES, MOST_STATES, WINDOW, StateGroup
from .state_sizes import state_sizes, steps_of_prompts_differ

NOT_PAGED = "use transformers' own cache"
REMADE = "make it with hf_accel.PagedCache(model.config)"
CONVOLVED_TOKENS = "conv_L_cache"  # the setting of LFM2 that says how many tokens its convolutions see
WITHOUT_STATE = ("moe", "mlp")  # what configs call layers that keep nothing
COMPRESSED_NUMBERS = "kv_lora_rank"  # the setting that says how many numbers stand for a token's keys and values
FIRST_TOKENS = 1024  # the initial capacity, in tokens over all sequences, of a cache that grows


class LayerKind(NamedTuple):
    """A kind of pages that a decoder layer has for its tokens: of keys and values, or one of the three below.

    window: the number of last tokens that it keeps; None for all. convolves: whether it keeps the inputs of a short
    convolution. recurs: whether it keeps a state of fixed size after a token. rank: the numbers that it keeps in place
    of a token's keys and values, and makes both from; None if it keeps these themselves.
    """

    window: int | None
    convolves: bool = False
    recurs: bool = False
    rank: int | None = None


RECURRENT_STATE = LayerKind(WINDOW, recurs=True)
# What a layer keeps: one kind; keys and values, and then a state; or nothing.
LayerKinds = tuple[LayerKind, ...]


@dataclass(frozen=True)
class ModelKinds:
    """The kinds of state that the decoder layers of a model keep, by its config.

    layers: of each layer. distinct: each kind once; states come last, so that the first group has the blocks of a
    sequence's tokens, if there are any. has_encoder: whether the layers keep something of an encoder's output too.
    steps_differ: see steps_of_prompts_differ.
    """

    layers: tuple[LayerKinds, ...]
    distinct: tuple[LayerKind, ...]
    has_encoder: bool
    steps_differ: bool

    @cached_property
    def windows(self) -> list[int | None]:
        """Return the window of what each decoder layer keeps first; None for all, and for nothing."""
        return [kinds[0].window if kinds else None for kinds in self.layers]

    @cached_property
    def convolves(self) -> bool:
        return any(kind.convolves for kind in self.distinct)

    @cached_property
    def recurs(self) -> bool:
        return any(kind.recurs for kind in self.distinct)

    @cached_property
    def compresses(self) -> bool:
        return any(kind.rank is not None for kind in self.distinct)

    @cached_property
    def is_states_alone(self) -> bool:
        """Return whether the layers keep recurrent states and nothing else: no layer attends."""
        return all(kind.recurs for kind in self.distinct)


@dataclass
class _Known:
    """The kinds of a config, which is held weakly, and the settings of its decoder of which they were made."""

    config: weakref.ref[Any]
    settings: dict[str, Any]
    kinds: ModelKinds


_known: dict[int, _Known] = {}  # by the id of the config


def model_kinds(config: PreTrainedConfig) -> ModelKinds:
    """Return what the decoder layers of a model keep, as in transformers' DynamicCache.

    It is made once, and again if a setting in the decoder's config has changed. Raises UnsupportedError for a layer
    that caches anything else.
    """
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedError(f"config is a {type(config).__name__}; a PagedCache is made from model.config")
    decoder, known = config.get_text_config(decoder=True), _known.get(id(config))
    settings = {name: list(value) if isinstance(value, list) else value for name, value in vars(decoder).items()}
    if known is not None and known.config() is config and known.settings == settings:
        return known.kinds
    layers = _layer_kinds(config, decoder)
    distinct = sorted(dict.fromkeys(kind for own in layers for kind in own), key=lambda kind: kind.recurs)
    kinds = ModelKinds(tuple(layers), tuple(distinct), config.is_encoder_decoder, steps_of_prompts_differ(decoder))
    key = id(config)
    _known[key] = _Known(weakref.ref(config, lambda _: _known.pop(key, None)), settings, kinds)
    return kinds


def keeps_states_alone(config: PreTrainedConfig) -> bool:
    """Return whether the layers of a decoder keep recurrent states and nothing else: no layer attends."""
    try:
        return model_kinds(config).is_states_alone
    except UnsupportedError:
        return False


def windows_of_pages(groups: list[PageGroup], groups_of_layer: list[tuple[int, ...]]) -> list[int | None]:
    """Return ModelKinds.windows of the config of which `page_groups` made these."""
    return [groups[own[0]].window if own else None for own in groups_of_layer]


def _layer_kinds(config: PreTrainedConfig, decoder: Any) -> list[LayerKinds]:
    """Return what each layer of a decoder keeps. Raises what `model_kinds` raises."""
    if "chunked_attention" in (getattr(decoder, "layer_types", None) or ()):
        raise UnsupportedError(f"a paged cache cannot hold chunked attention layers; {NOT_PAGED}")
    found: list[LayerKinds] = []
    try:
        layers = DynamicCache(config=decoder).layers
    except (AttributeError, RuntimeError) as error:
        raise UnsupportedError(f"transformers makes no cache from a {type(decoder).__name__}; {NOT_PAGED}") from error
    for layer, name in zip(layers, layer_names(decoder, len(layers)), strict=False):
        kinds = kinds_of_layer(layer, name, decoder)
        if kinds is None:
            raise UnsupportedError(f"a paged cache cannot hold a {type(layer).__name__}; {NOT_PAGED}")
        found.append(kinds)
    if not any(found):
        raise UnsupportedError(
            f"{type(config).__name__} describes no decoder layers, and a paged cache needs some; {NOT_PAGED}"
        )
    return found


def layer_names(decoder: Any, count: int) -> list[str | None]:
    """Return what a decoder's config calls each of `count` layers; None where it has one kind alone."""
    return list(getattr(decoder, "layer_types", None) or [None] * count)


def kinds_of_layer(layer: Any, name: str | None, decoder: Any) -> LayerKinds | None:
    """Return what a layer of transformers' DynamicCache keeps; None if pages cannot hold it.

    name: what the decoder's config calls the layer.
    """
    if name in WITHOUT_STATE:
        return ()
    attends = _attending(layer, decoder)
    if attends is not None and name not in ("hybrid", "hybrid_sliding"):
        return (attends,) if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else None
    window = getattr(decoder, CONVOLVED_TOKENS, None)
    if not isinstance(layer, LinearAttentionLayer):
        return None
    if name == "conv" and type(layer) is LinearAttentionLayer and isinstance(window, int):
        return (LayerKind(window, convolves=True),)
    if state_sizes(decoder) is None or getattr(layer, "number_of_states", 1) != 1:
        return None
    if name == "linear_attention" and type(layer) is LinearAttentionLayer:
        return (RECURRENT_STATE,)
    return None if attends is None else (attends, RECURRENT_STATE)


def _attending(layer: Any, decoder: Any) -> LayerKind | None:
    """Return the kind of the keys and values that a layer keeps, next to a state or alone; None if it keeps none."""
    rank = getattr(decoder, COMPRESSED_NUMBERS, None)
    if isinstance(layer, DynamicSlidingWindowLayer):
        return LayerKind(layer.sliding_window, rank=rank)
    return LayerKind(None, rank=rank) if isinstance(layer, DynamicLayer) else None


def page_groups(
    config: PreTrainedConfig,
    settings: CacheConfig,
    *,
    capacity: int = FIRST_TOKENS,
    context: SharedContext | None = None,
) -> tuple[list[PageGroup], list[tuple[int, ...]]]:
    """Make a PageGroup for each kind of pages, and return them with the indices of each layer's groups.

    A layer that keeps keys and values and a state has two, in this order, and one that keeps nothing has none.

    The last group of an encoder-decoder holds what its layers keep of the encoder's output.
    capacity: the tokens that a growing cache has room for at first. context: the ranks that share out the blocks.
    """
    kinds = model_kinds(config)
    tokens = capacity if settings.max_tokens is None else settings.max_tokens
    num_blocks, growable = max(1, -(-tokens // settings.block_size)), settings.max_tokens is None
    groups = [
        StateGroup(
            num_blocks=FIRST_STATES if growable else most_states(num_blocks),
            growable=growable,
            prefix_sharing=settings.prefix_sharing and not kinds.steps_differ,
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
        for kind in kinds.distinct
    ]
    for group, kind in zip(groups, kinds.distinct, strict=True):
        group.rank = kind.rank
    if kinds.has_encoder:
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
    return groups, [tuple(map(kinds.distinct.index, own)) for own in kinds.layers]


def most_states(num_blocks: int) -> int:
    """Return the states for which a pool of fixed size has room, next to `num_blocks` blocks of keys and values.

    Each sequence has a block at least, and two states; drafts take more of them.
    """
    return WINDOW * num_blocks + MOST_STATES


def sharing_refusal(config: PreTrainedConfig) -> str | None:
    """Return why ranks cannot share out the pages of a model, as one clause; None if they can."""
    kinds = model_kinds(config)
    if kinds.convolves or kinds.recurs:
        return "layers that are no attention need all that they keep on each rank"
    if kinds.compresses:
        return "no rank knows how to attend over a part of the compressed keys"
    return None


def check_windows(own: list[int | None], config: PreTrainedConfig) -> None:
    """Raise UnsupportedError unless `own`, the windows of a cache's layers, are those of this config."""
    wanted = model_kinds(config).windows
    if own != wanted:
        raise UnsupportedError(
            f"the PagedCache is for {_described(own)}, and the model has {_described(wanted)}; {REMADE}"
        )


def _described(windows: list[int | None]) -> str:
    phrases = dict.fromkeys("without a window" if w is None else f"with a window of {w}" for w in windows)
    return f"{len(windows)} layers {' and '.join(phrases)}"
