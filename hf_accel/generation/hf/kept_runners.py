"""Runners with graphs, and the pages of these, which stay for the next call of generate() or generate_batch()."""

from __future__ import annotations

from typing import Any

from ...cache.hf import PagedCache, model_kinds, page_groups, windows_of_pages
from ...config import CacheConfig
from .generation_state import GenerationState
from .graphed_runner import GraphedRunner

MAX_FIRST_TOKENS = 65536  # the largest initial capacity of a cache in tokens
MOST_KEPT_BYTES = 2 * 2**30  # of pages that nobody uses, or this share of a larger GPU:
KEPT_SHARE = 24


def keep_runner(state: GenerationState, runner: Any, settings: CacheConfig) -> None:
    """Keep a runner of graphs, and its pages, whose addresses they have, unless the pages are too large."""
    if not isinstance(runner, GraphedRunner):
        return
    if sum(group.nbytes for group in runner.groups) > max(MOST_KEPT_BYTES, runner.maker.total_bytes() // KEPT_SHARE):
        return
    runner.model = None  # without a circle, a model is freed when the user drops it
    runner.settings = settings
    state.runner = runner


def take_kept(state: GenerationState, config: Any, settings: CacheConfig | None, capacity: int) -> PagedCache | None:
    """Return an empty cache over the pages that were kept, with their runner; None if they cannot serve a call.

    config: of what reads the pages. capacity: the tokens that the call may need.
    """
    runner: GraphedRunner | None = state.runner
    state.runner = None
    if runner is None or settings is None or runner.settings != settings:
        return None
    if windows_of_pages(runner.groups, runner.groups_of_layer) != model_kinds(config).windows:
        return None
    is_used = any(group.pool.num_used for group in runner.groups)  # by a cache that an earlier call has returned
    if is_used or any(group.pool.num_blocks * group.pool.block_size < capacity for group in runner.groups):
        return None
    cache = PagedCache.over(runner.groups, runner.groups_of_layer, settings, config)
    cache.runner = runner
    return cache


def cache_for_rows(state: GenerationState, config: Any, rows: int, length: int) -> PagedCache:
    """Return an empty PagedCache for rows of up to so many tokens. config: of what reads the pages."""
    assert state.cache is not None
    capacity = rows * -(-length // state.cache.block_size) * state.cache.block_size  # so that no row makes it grow
    if state.call is not None and (kept := take_kept(state, config, state.cache, capacity)) is not None:
        return kept
    pages = page_groups(config, state.cache, capacity=min(capacity, MAX_FIRST_TOKENS), context=state.context)
    return PagedCache.over(*pages, state.cache, config)
