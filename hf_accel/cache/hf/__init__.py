"""Paged KV caches as transformers' Cache: PagedCache for padded batches, RaggedCache for ragged passes."""

from .encoder_decoder import RaggedEncoderDecoderCache
from .kinds import (
    NOT_PAGED,
    attends_to_sources,
    keeps_states_alone,
    kinds_of_layer,
    layer_names,
    model_kinds,
    page_groups,
    sharing_refusal,
    windows_of_pages,
)
from .layers import PAGED_HANDLE, CacheOverPages, PagedKV, RecurrentPass
from .paged import PagedCache
from .ragged import RaggedCache
from .room import fixed_settings, share_settings
from .tokens_before import TokensBefore

__all__ = [
    "NOT_PAGED",
    "PAGED_HANDLE",
    "CacheOverPages",
    "PagedCache",
    "PagedKV",
    "RaggedCache",
    "RaggedEncoderDecoderCache",
    "RecurrentPass",
    "TokensBefore",
    "attends_to_sources",
    "fixed_settings",
    "keeps_states_alone",
    "kinds_of_layer",
    "layer_names",
    "model_kinds",
    "page_groups",
    "share_settings",
    "sharing_refusal",
    "windows_of_pages",
]
