"""A ModelRunner that replays CUDA graphs of passes over a few tokens each, and is kept for the next generate()."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...attention import PlannedAttention
from ...cache.group import PageGroup
from ...cache.hf import PagedCache, page_groups
from ...cache.step import Step
from ...config import CacheConfig
from ...recognition.unchanged import Hooks, has_own_forward
from ...tensors import autocast_dtype, integers, packed, plain_tensors, views
from ...undo.state import BACKEND_ATTRIBUTE, find_state
from ..buckets import MOST_ROWS, Bucket, PaddedPass, padded
from ..carried import Carried
from ..graphs import SPLIT, Graph, GraphMaker, make_graphs
from ..speculation.costs import done_once
from .generation_state import GenerationState
from .model_runner import ModelRunner, pass_inputs, prepare_step

MOST_BYTES = 4 * 2**30  # of all graphs of a runner
LEAST_FREE_BYTES = 2**30  # of the device; with less, no more graphs are captured


@dataclass
class GraphStatistics:
    """captures, replays: how often graphs were made and run. eager: passes that ran without one, by the reason.

    dropped: how often all graphs were dropped, by the reason. nbytes: the memory that captures took.
    """

    captures: int = 0
    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "captures": self.captures, "replays": self.replays, "eager": dict(self.eager),
            "dropped": dict(self.dropped), "bytes": self.nbytes,
        }  # fmt: skip


@dataclass(frozen=True)
class CapturedPass:
    """A graph, and the memory from which it reads the inputs, ids among them, and to which it writes logits [n, V]."""

    graph: Graph
    static: Tensor
    ids: Tensor
    logits: Tensor


class GraphedRunner(ModelRunner):
    """Pads each pass to a bucket, captures a graph when a bucket is first met, and replays it from then on.

    A pass that has no bucket, or cannot be captured, runs as a ModelRunner runs it; `statistics` says why. Graphs are
    dropped when pages or weights have moved: pages are looked at before each pass, and the model after check_model().
    invariant_rows: no pass is padded to more rows than these, see Speculation; None for any number.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        groups: list[PageGroup],
        groups_of_layer: list[tuple[int, ...]],
        *,
        maker: GraphMaker,
        invariant_rows: int | None = None,
    ) -> None:
        super().__init__(model, groups, groups_of_layer)
        self.groups, self.maker = groups, maker
        self.most_rows = MOST_ROWS if invariant_rows is None else min(MOST_ROWS, invariant_rows)
        self.most_bytes, self.least_free_bytes = MOST_BYTES, LEAST_FREE_BYTES
        self.statistics = GraphStatistics()
        self._graphs: dict[Bucket, CapturedPass] = {}
        self._logits: Tensor | None = None  # all graphs write their logits here
        self._dependencies: Dependencies | None = None
        self._is_checked = False
        self._model_refusal: str | None = None  # why no pass of the model can be captured
        self._full: str | None = None  # why no more graphs are captured
        self._pages: list[int] = []
        config = model.config.get_text_config(decoder=True)
        self.most_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.settings: CacheConfig | None = None  # of the pages, where the runner is kept
        for group in groups:
            group.add_scratch()

    def check_model(self) -> None:
        """Compare the model with the one that was captured before the next pass. Its weights may have moved."""
        self._is_checked = False

    @property
    def goes_ahead(self) -> bool:
        """Return whether a pass may be launched before the host has read the tokens of the last one, and be taken.

        What the host does between passes takes long compared with a replay. A hook must see only passes that count.
        """
        known = self._dependencies
        return known is not None and self._model_refusal is None and known.hook_refusal is None

    def __call__(
        self, ids: list[int] | Tensor, positions: list[int], step: Step, keep: list[int],
        *, carried: Carried | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute N tokens; see ModelRunner."""
        refusal = self._refusal() if carried is None else carried.graph_refusal
        found: PaddedPass | str | None = None
        if refusal is None:
            inputs = pass_inputs(ids, positions, step, keep)
            found = padded(inputs, len(keep), self.groups, most_rows=self.most_rows)
            if isinstance(found, PaddedPass):
                captured = self._captured(found)
                if isinstance(captured, CapturedPass):
                    return self._replay(captured, found, ids if isinstance(ids, Tensor) else None)
                refusal = captured
            else:
                refusal = found
        self.statistics.eager[refusal] += 1
        return super().__call__(ids, positions, step, keep, carried=carried)

    # -- what cannot be captured -----------------------------------------------------------------------

    def _refusal(self) -> str | None:
        """Return why the next pass cannot be a graph, as a clause. Drops graphs of other pages and weights."""
        if not self._is_checked:
            self._check()
        assert self._dependencies is not None
        if self._model_refusal is not None:
            return self._model_refusal
        if autocast_dtype(self.device.type) is not None:
            return "torch.autocast is on"
        storages = [storage for group in self.groups for storage in group.storages.values()]
        if len(storages) < sum(map(len, self.groups_of_layer)):
            return "the first pass makes the pages"
        pages = [storage.pages.k.data_ptr() for storage in storages]
        if pages != self._pages:
            self._drop("the pages have moved")
            self._pages = pages
        return self._dependencies.hook_refusal

    def _check(self) -> None:
        dependencies = Dependencies(self.model)
        if self._dependencies is not None and dependencies.values != self._dependencies.values:
            self._drop("the model has changed")
        self._dependencies, self._is_checked = dependencies, True
        self._model_refusal = model_refusal_of_graphs(self.model)

    def free_graphs(self) -> bool:
        """Drop all graphs, and capture none until the model changes. Returns whether there were any."""
        had_any = bool(self._graphs)
        self._drop("their memory was needed")
        self._full = "the memory of graphs was needed for passes"
        return had_any

    def _drop(self, why: str) -> None:
        self._full = None
        if self._graphs:
            self.statistics.dropped[why] += 1
            self._graphs.clear()
            self._logits, self.statistics.nbytes = None, 0

    # -- graphs ----------------------------------------------------------------------------------------

    def _captured(self, found: PaddedPass) -> CapturedPass | str:
        """The graph of a bucket, captured if it is missing; or why there is none, as a clause."""
        captured = self._graphs.get(found.bucket)
        if captured is not None:
            return captured
        if self._full is None and self.statistics.nbytes >= self.most_bytes:
            self._full = f"graphs take {self.statistics.nbytes:,} bytes already"
        if self._full is None and self.maker.free_bytes() < self.least_free_bytes:
            self._full = "too little memory is free for one more graph"
        if self._full is not None:
            return self._full
        try:
            # Without inference mode, because a later pass outside of it must be able to write to these tensors.
            with done_once(), torch.inference_mode(False), torch.no_grad():
                captured = self._capture(found)
        except torch.OutOfMemoryError:
            self._full = "there was no memory for one more graph"
        except Exception as error:  # the pass then runs as it does without graphs, and raises what is not of a capture
            lines = str(error).splitlines() or [type(error).__name__]
            self._full = f"a capture failed: {lines[0]}"
        else:
            self._graphs[found.bucket] = captured
            self.statistics.captures += 1
            self.statistics.nbytes += captured.graph.nbytes
            return captured
        return self._full

    def _capture(self, found: PaddedPass) -> CapturedPass:
        tensors = found.inputs.tensors
        static = packed(tensors, self.device).to(self.device)
        inputs = found.inputs.with_tensors(views(static, tensors))
        everything = not found.bucket.only_last
        outputs: list[Tensor] = []

        def run() -> None:
            outputs[:] = [self._store(self.compute(inputs, everything=everything))]

        graph = self.maker.capture(run)
        return CapturedPass(graph, static, inputs.ids, outputs[0])

    def _store(self, logits: Tensor) -> Tensor:
        """Copy logits [n, V] to where all graphs write them. Otherwise each graph would keep memory for its own."""
        if self._logits is None or self._logits.shape[0] < len(logits) or self._logits.dtype is not logits.dtype:
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)].copy_(logits)

    def _replay(self, captured: CapturedPass, found: PaddedPass, ids: Tensor | None) -> Tensor:
        captured.static.copy_(packed(found.inputs.tensors, self.device), non_blocking=True)
        if ids is not None:  # one of each sequence, so that padding stands behind them
            captured.ids[: len(ids)].copy_(ids)
        captured.graph.replay()
        self.statistics.replays += 1
        kept = found.kept
        if kept == list(range(len(kept))):
            return captured.logits[: len(kept)].clone()
        [rows] = views(packed([integers(kept)], self.device).to(self.device, non_blocking=True), [integers(kept)])
        return captured.logits[rows]


MAX_FIRST_TOKENS = 65536  # the largest initial capacity of a cache in tokens
MOST_KEPT_BYTES = 2 * 2**30  # of pages that nobody uses


def make_runner(
    model: PreTrainedModel,
    groups: list[PageGroup],
    groups_of_layer: list[tuple[int, ...]],
    invariant_rows: int | None = None,
) -> ModelRunner:
    """The ModelRunner of a model over these pages, with graphs where its device has them."""
    state = find_state(model)
    call = None if state is None else state.generation.call
    if call is not None and call.runner is not None and call.runner.groups is groups:
        kept: GraphedRunner = call.runner
        kept.model, call.runner = model, None
        kept.statistics = GraphStatistics(nbytes=kept.statistics.nbytes)
        return kept
    runner = ModelRunner(model, groups, groups_of_layer)
    maker = make_graphs(runner.device)
    if maker is None:
        return runner
    return GraphedRunner(model, groups, groups_of_layer, maker=maker, invariant_rows=invariant_rows)


def keep_runner(state: GenerationState, runner: GraphedRunner, settings: CacheConfig) -> None:
    """Keep a runner, and its pages, whose addresses the graphs have, unless the pages are too large."""
    if sum(group.nbytes for group in runner.groups) > MOST_KEPT_BYTES:
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
    return PagedCache.over(runner.groups, runner.groups_of_layer, runner.settings, config)


def cache_for_rows(state: GenerationState, config: Any, rows: int, length: int) -> PagedCache:
    """Return an empty PagedCache for rows of up to so many tokens. config: of what reads the pages."""
    assert state.cache is not None
    capacity = rows * -(-length // state.cache.block_size) * state.cache.block_size  # so that no row makes it grow
    kept = None if state.runner is None else cache_of_kept(state, config, capacity)
    if kept is not None:
        return kept
    pages = page_groups(config, state.cache, capacity=min(capacity, MAX_FIRST_TOKENS), context=state.context)
    return PagedCache.over(*pages, state.cache, config)


OPERATORS_ON_HOST = "the model attends by torch's operators, in passes that read numbers on the host"
SCALARS = (bool, int, float, str, NoneType, torch.dtype)


def model_refusal_of_graphs(model: nn.Module) -> str | None:
    """Return why no pass of a patched model can be captured, as a clause; None if it is not known that none can."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        return f"the model is on {len(devices)} devices"
    state = find_state(model)
    if state is not None and state.generation.agreement.size > 1:
        return SPLIT
    if state is not None and state.generation.form.operators is not None:
        return OPERATORS_ON_HOST
    for name, module in model.named_modules():
        if has_own_forward(module):
            return f"the forward of {name or 'the model'} was replaced on the module itself"
        planned: PlannedAttention | None = vars(module).get(BACKEND_ATTRIBUTE)
        if planned is not None and not planned.backend.capturable:
            return f"the attention backend {planned.backend.name!r} reads the lengths of sequences on the host"
    return None


class Dependencies:
    """The parts of a model that a graph depends on: addresses of its weights, plain values of modules, no hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.values = tuple(_values(model))
        self._hooks = Hooks(model.modules(), prepare_step)

    @property
    def hook_refusal(self) -> str | None:
        """The reason why no graph can run now, as a clause. It is cheap, so it can be asked before each pass."""
        return "a hook wants to see a module" if self._hooks.any_others() else None


def _values(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        own = vars(module)
        yield type(module)
        yield tuple((name, value) for name, value in own.items() if isinstance(value, SCALARS))
        yield id(own.get("_packed")), id(own.get(BACKEND_ATTRIBUTE))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            for plain in () if tensor is None else plain_tensors(tensor):
                yield plain.data_ptr(), plain.dtype, plain.shape
