"""The kinds of state that decoder layers keep of their tokens, from a model's config, and pages for each kind."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ...config import CacheConfig
from ...errors import UnsupportedError
from ...models import forget, layers_config
from ..group import PageGroup
from ..kinds import (
    Chunks,
    CompressedKeys,
    ConvolutionInputs,
    IndexKeys,
    KeysAndValues,
    Kind,
    OnceGroup,
    RecurrentStates,
    SourceKind,
)
from ..kinds.compressed_keys import RANK
from ..kinds.kind import GroupSettings
from ..kinds.state_sizes import sizes_without_cache, state_sizes, steps_of_prompts_differ
from ..kinds.states import WINDOW
from ..quantized import QUANTIZED
from ..step import SharedContext
from .cache_argument import CACHE_NAME

NOT_PAGED = "use transformers' own cache"
REMADE = "make it with hf_accel.PagedCache(model.config)"
CHUNKED = "chunked_attention"  # what configs call layers whose tokens attend within chunks (Llama 4)
CONVOLVED_TOKENS = "conv_L_cache"  # the setting of LFM2 that says how many tokens its convolutions see
SOURCES = "cross_attention_layers"  # the setting of Mllama that says which layers attend to images, and to no tokens
REUSES = "reuse"  # what configs call a layer that attends to the keys and values of another
SELECTS_AS_BEFORE = "shared"  # what configs call a layer that attends to the tokens that one before it has selected
WITHOUT_STATE = ("moe", "mlp", REUSES)  # what configs call layers that keep nothing
FIRST_TOKENS = 1024  # the initial capacity, in tokens over all sequences, of a cache that grows


# What a layer keeps: one kind; keys and values, and then a state; or nothing.
LayerKinds = tuple[Kind, ...]


@dataclass(frozen=True)
class ModelKinds:
    """The kinds of state that the decoder layers of a model keep, by its config.

    layers: of each layer. distinct: each kind once; states come last, so that the first group has the blocks of a
    sequence's tokens, if there are any. has_encoder: whether the layers keep something of an encoder's output too.
    """

    layers: tuple[LayerKinds, ...]
    distinct: tuple[Kind, ...]
    has_encoder: bool

    @cached_property
    def windows(self) -> list[int | None]:
        """Return the window of what each decoder layer keeps first; None for all, and for nothing."""
        return [kinds[0].window if kinds else None for kinds in self.layers]

    @cached_property
    def mask_windows(self) -> list[int | None]:
        """Return the window of the mask of each decoder layer."""
        return [kinds[0].mask_window if kinds else None for kinds in self.layers]

    def has(self, *kinds: type[Kind]) -> bool:
        """Return whether a layer keeps something of one of these kinds."""
        return any(isinstance(each, kinds) for each in self.distinct)

    @cached_property
    def is_states_alone(self) -> bool:
        """Return whether the layers keep recurrent states and nothing else: no layer attends."""
        return all(isinstance(kind, RecurrentStates) for kind in self.distinct)


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
    decoder, known = layers_config(config), _known.get(id(config))
    if known is not None and known.config() is config and known.settings == vars(decoder):
        return known.kinds
    settings = {name: list(value) if isinstance(value, list) else value for name, value in vars(decoder).items()}
    layers = _layer_kinds(config, decoder)
    distinct = sorted(dict.fromkeys(kind for own in layers for kind in own), key=lambda kind: not kind.holds_tokens)
    kinds = ModelKinds(tuple(layers), tuple(distinct), config.is_encoder_decoder)
    key = id(config)
    _known[key] = _Known(weakref.ref(config, partial(forget, _known, key)), settings, kinds)
    return kinds


def keeps_states_alone(config: PreTrainedConfig) -> bool:
    """Return whether the layers of a decoder keep recurrent states and nothing else: no layer attends."""
    try:
        return model_kinds(config).is_states_alone
    except UnsupportedError:
        return False


def attends_to_sources(config: PreTrainedConfig) -> bool:
    """Return whether layers of a decoder attend to more than tokens: to an encoder's output, or to images."""
    try:
        return bool(config.is_encoder_decoder) or model_kinds(config).has(SourceKind)
    except UnsupportedError:
        return False


def refuse_sources(config: PreTrainedConfig) -> None:
    """Raise UnsupportedError for a model whose images a cache that is passed along cannot hold."""
    if model_kinds(config).has(SourceKind):
        raise UnsupportedError(
            f"a PagedCache that is passed along cannot hold the images that layers of a {type(config).__name__} "
            f"attend to; leave {CACHE_NAME}= out, and generate() makes pages for them"
        )


def windows_of_pages(groups: list[PageGroup], groups_of_layer: list[tuple[int, ...]]) -> list[int | None]:
    """Return ModelKinds.windows of the config of which `page_groups` made these."""
    return [groups[own[0]].window if own else None for own in groups_of_layer]


def _layer_kinds(config: PreTrainedConfig, decoder: Any) -> list[LayerKinds]:
    """Return what each layer of a decoder keeps. Raises what `model_kinds` raises."""
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
    """Return what a decoder's config calls each of `count` layers; None where it has one kind alone.

    A layer that attends to the keys and values of another is called "reuse", whatever its mask is, and one that
    attends to images alone by the name of the setting that lists these.
    """
    names = list(getattr(decoder, "layer_types", None) or [None] * count)
    shared = getattr(decoder, "indexer_types", None) or []
    pairs = list(zip_longest(names, shared))[: len(names)]
    names = [SELECTS_AS_BEFORE if kind == SELECTS_AS_BEFORE else name for name, kind in pairs]
    modes = getattr(decoder, "kv_sharing_modes", None) or [None] * len(names)
    names = [REUSES if mode == REUSES else name for name, mode in zip(names, modes, strict=False)]
    sources = getattr(decoder, SOURCES, None) or ()
    return [SOURCES if index in sources else name for index, name in enumerate(names)]


def kinds_of_layer(layer: Any, name: str | None, decoder: Any) -> LayerKinds | None:
    """Return what a layer of transformers' DynamicCache keeps; None if pages cannot hold it.

    name: what the decoder's config calls the layer.
    """
    if name in WITHOUT_STATE:
        return ()
    if name == SOURCES:
        return (SourceKind(None),) if type(layer) is DynamicLayer else None
    if (own := sizes_without_cache(decoder)) is not None:
        return (RecurrentStates(WINDOW, own, steps_differ=False),)
    attends = _attending(layer, name, decoder)
    if attends is not None and name not in ("hybrid", "hybrid_sliding"):
        if type(layer).__name__ == "DynamicIndexedLayer":  # which older transformers do not have
            return (attends,) if name == SELECTS_AS_BEFORE else (attends, IndexKeys(None))
        return (attends,) if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else None
    window = getattr(decoder, CONVOLVED_TOKENS, None)
    if not isinstance(layer, LinearAttentionLayer):
        return None
    if name == "conv" and type(layer) is LinearAttentionLayer and isinstance(window, int):
        return (ConvolutionInputs(window),)
    sizes = state_sizes(decoder)
    if sizes is None:
        return None
    state = RecurrentStates(WINDOW, sizes, steps_of_prompts_differ(decoder))
    if name == "linear_attention" and type(layer) is LinearAttentionLayer:
        return (state,)
    return None if attends is None else (attends, state)


def _attending(layer: Any, name: str | None, decoder: Any) -> Kind | None:
    """Return the kind of the keys and values that a layer keeps, next to a state or alone; None if it keeps none."""
    slides = isinstance(layer, DynamicSlidingWindowLayer)
    if not slides and not isinstance(layer, DynamicLayer):
        return None
    window, rank = layer.sliding_window if slides else None, getattr(decoder, RANK, None)
    if slides and (name == CHUNKED or (name is None and not getattr(decoder, "sliding_window", None))):
        return Chunks(window)
    return KeysAndValues(window) if rank is None else CompressedKeys(window, rank)


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
    refusal = blocks_refusal(config, settings)
    if refusal is not None:
        raise UnsupportedError(refusal)
    tokens = capacity if settings.max_tokens is None else settings.max_tokens
    each = GroupSettings(
        num_blocks=max(1, -(-tokens // settings.block_size)),
        block_size=settings.block_size,
        growable=settings.max_tokens is None,
        prefix_sharing=settings.prefix_sharing,
        quantized=QUANTIZED.get(settings.dtype),
    )
    groups = [kind.group(**each) for kind in kinds.distinct]
    if kinds.has_encoder:
        groups.append(OnceGroup(window=None, **(each | {"prefix_sharing": False})))
    for group in groups:
        group.context = context
    return groups, [tuple(map(kinds.distinct.index, own)) for own in kinds.layers]


def blocks_refusal(config: PreTrainedConfig, settings: CacheConfig) -> str | None:
    """Return why blocks of these settings cannot hold what a model's layers keep, as one clause; None if they can."""
    refusals = (kind.block_refusal(settings.block_size) for kind in model_kinds(config).distinct)
    return next(filter(None, refusals), None)


def sharing_refusal(config: PreTrainedConfig) -> str | None:
    """Return why ranks cannot share out the pages of a model, as one clause; None if they can."""
    return next(filter(None, (kind.ranks_clause for kind in model_kinds(config).distinct)), None)


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
