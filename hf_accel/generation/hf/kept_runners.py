"""Makes the ModelRunner of a session, and keeps one with graphs, and its pages, for the next call of generate()."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ...cache.group import PageGroup
from ...cache.hf import PagedCache
from ...config import CacheConfig
from ...undo.state import find_state
from ..graphs import make_graphs
from .generation_state import GenerationState
from .graphed_runner import GraphedRunner, GraphStatistics
from .model_runner import ModelRunner

MOST_KEPT_BYTES = 2 * 2**30  # of pages that nobody uses


def make_runner(
    model: PreTrainedModel, groups: list[PageGroup], group_of_layer: list[int], invariant_rows: int | None = None
) -> ModelRunner:
    """The ModelRunner of a model over these pages, with graphs where its device has them."""
    state = find_state(model)
    call = None if state is None else state.generation.call
    if call is not None and call.runner is not None and call.runner.groups is groups:
        kept: GraphedRunner = call.runner
        kept.model, call.runner = model, None
        kept.statistics = GraphStatistics(nbytes=kept.statistics.nbytes)
        return kept
    runner = ModelRunner(model, groups, group_of_layer)
    maker = make_graphs(runner.device)
    if maker is None:
        return runner
    return GraphedRunner(model, groups, group_of_layer, maker=maker, invariant_rows=invariant_rows)


def keep_runner(state: GenerationState, runner: Any, settings: CacheConfig) -> None:
    """Keep a runner that has graphs, and its pages, whose addresses the graphs have. Others are not kept."""
    if not isinstance(runner, GraphedRunner) or sum(group.nbytes for group in runner.groups) > MOST_KEPT_BYTES:
        return
    runner.model = None  # without a circle, a model is freed when the user drops it
    runner.settings = settings
    state.runner = runner


def cache_of_kept(state: GenerationState, config: Any, capacity: int) -> PagedCache | None:
    """An empty PagedCache over the pages of the runner that was kept; None if they cannot serve this call.

    The call then has this runner. capacity: the tokens that the call may need.
    """
    runner, state.runner = state.runner, None
    if runner is None or state.call is None or runner.settings != state.cache:
        return None
    is_used = any(group.pool.num_used for group in runner.groups)  # by a cache that an earlier call has returned
    if is_used or any(group.pool.num_blocks * group.pool.block_size < capacity for group in runner.groups):
        return None
    state.call.runner = runner
    return PagedCache.over(runner.groups, runner.group_of_layer, runner.settings, config)
