"""A ModelRunner that replays CUDA graphs of passes over a few tokens each, and is kept for the next generate()."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...attention import PlannedAttention
from ...cache.group import PageGroup
from ...cache.step import PassInputs, Step
from ...config import CacheConfig
from ...models import modules_of
from ...recognition.unchanged import Hooks, has_own_forward
from ...tensors import autocast_dtype, integers, packed, plain_tensors, views
from ...undo.state import BACKEND_ATTRIBUTE, find_state
from ..buckets import MOST_ROWS, Bucket, PaddedPass, padded
from ..carried import Carried
from ..graphs import SPLIT, Graph, GraphMaker, make_graphs
from ..speculation.costs import done_once
from .model_runner import ModelRunner, pass_inputs, prepare_step

FIRST_PROMPT = "a pass with prompts, of a shape that was met for the first time"
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

    One of prompts is captured when it is met again: a capture takes as long as two passes, and few prompts have the
    same shape. A pass that has no bucket, or cannot be captured, runs as a ModelRunner runs it; `statistics` says why.
    Graphs are dropped when pages or weights have moved: pages are looked at before each pass, and the model after
    check_model().
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
        self._met: set[Bucket] = set()  # of prompts
        self._logits: Tensor | None = None  # all graphs write their logits here
        self._dependencies: Dependencies | None = None
        self._is_checked = False
        self._reading: object = None
        self._model_refusal: str | None = None  # why no pass of the model can be captured
        self._full: str | None = None  # why no more graphs are captured
        self._no_prompts: str | None = None  # why none of prompts are
        self._pages: list[int] = []
        config = model.config.get_text_config(decoder=True)
        self.most_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.settings: CacheConfig | None = None  # of the pages, where the runner is kept
        for group in groups:
            group.add_scratch()

    def check_model(self, reading: object) -> None:
        """Compare the model with the one that was captured, before the next pass: its weights may have moved.

        reading: that of the model's watch, by now; while it is the same object, so is all of the model.
        """
        self._is_checked &= reading is not None and reading is self._reading
        self._reading = reading

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
            if isinstance(found, PaddedPass) and found.bucket.is_of_prompts and found.bucket not in self._met:
                self._met.add(found.bucket)
                self.statistics.eager[FIRST_PROMPT] += 1
                return self._padded_logits(found)
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
        self._full = self._no_prompts = None
        self._met.clear()
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
        refusal = self._full or (self._no_prompts if found.bucket.is_of_prompts else None)
        if refusal is not None:
            return refusal
        try:
            # Without inference mode, because a later pass outside of it must be able to write to these tensors.
            with done_once(), torch.inference_mode(False), torch.no_grad():
                captured = self._capture(found)
        except torch.OutOfMemoryError:
            refusal = "there was no memory for one more graph"
        except Exception as error:  # the pass then runs as it does without graphs, and raises what is not of a capture
            lines = str(error).splitlines() or [type(error).__name__]
            refusal = f"a capture failed: {lines[0]}"
        else:
            self._graphs[found.bucket] = captured
            self.statistics.captures += 1
            self.statistics.nbytes += captured.graph.nbytes
            return captured
        if found.bucket.is_of_prompts:  # these take other kernels, and more memory, than passes of few tokens
            self._no_prompts = refusal
        else:
            self._full = refusal
        return refusal

    def _padded_logits(self, found: PaddedPass) -> Tensor:
        """Compute a pass as its graph would, with as many rows: the rows have the bits that the graph will give."""
        _, inputs = self._on_device(found)
        return self._kept(self.compute(inputs, everything=not found.bucket.only_last), found)

    def _on_device(self, found: PaddedPass) -> tuple[Tensor, PassInputs]:
        """Return the inputs of a padded pass on the device, and the memory in which they are."""
        tensors = found.inputs.tensors
        static = packed(tensors, self.device).to(self.device)
        return static, found.inputs.with_tensors(views(static, tensors))

    def _capture(self, found: PaddedPass) -> CapturedPass:
        static, inputs = self._on_device(found)
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
        return self._kept(captured.logits, found)

    def _kept(self, logits: Tensor, found: PaddedPass) -> Tensor:
        """Copy the rows of a bucket's logits that a pass asked for."""
        kept = found.kept
        if kept == list(range(len(kept))):
            return logits[: len(kept)].clone()
        [rows] = views(packed([integers(kept)], self.device).to(self.device, non_blocking=True), [integers(kept)])
        return logits[rows]


def make_runner(
    model: PreTrainedModel,
    groups: list[PageGroup],
    groups_of_layer: list[tuple[int, ...]],
    invariant_rows: int | None = None,
    *,
    kept: GraphedRunner | None = None,
) -> ModelRunner:
    """The ModelRunner of a model over these pages, with graphs where its device has them. kept: of an earlier call."""
    if kept is not None and kept.groups is groups:
        kept.model = model
        kept.statistics = GraphStatistics(nbytes=kept.statistics.nbytes)
        return kept
    runner = ModelRunner(model, groups, groups_of_layer)
    maker = make_graphs(runner.device)
    if maker is None:
        return runner
    return GraphedRunner(model, groups, groups_of_layer, maker=maker, invariant_rows=invariant_rows)


OPERATORS_ON_HOST = "the model attends by torch's operators, in passes that read numbers on the host"
SCALARS = (bool, int, float, str, NoneType, torch.dtype)


def model_refusal_of_graphs(model: nn.Module) -> str | None:
    """Return why no pass of a patched model can be captured, as a clause; None if it is not known that none can."""
    modules = modules_of(model)
    tensors = (each for module in modules for each in (*module._parameters.values(), *module._buffers.values()))
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        return f"the model is on {len(devices)} devices"
    state = find_state(model)
    if state is not None and state.generation.agreement.size > 1:
        return SPLIT
    if state is not None and state.generation.form.operators is not None:
        return OPERATORS_ON_HOST
    for module in modules:
        if has_own_forward(module):
            name = next(name for name, one in model.named_modules() if one is module)
            return f"the forward of {name or 'the model'} was replaced on the module itself"
        planned: PlannedAttention | None = vars(module).get(BACKEND_ATTRIBUTE)
        if planned is not None and not planned.backend.capturable:
            return f"the attention backend {planned.backend.name!r} reads the lengths of sequences on the host"
    return None


class Dependencies:
    """The parts of a model that a graph depends on: addresses of its weights, plain values of modules, no hooks."""

    def __init__(self, model: nn.Module) -> None:
        modules = modules_of(model)
        self.values = tuple(_values(modules))
        self._hooks = Hooks(modules, prepare_step)

    @property
    def hook_refusal(self) -> str | None:
        """The reason why no graph can run now, as a clause. It is cheap, so it can be asked before each pass."""
        return "a hook wants to see a module" if self._hooks.any_others() else None


def _values(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in modules:
        own = vars(module)
        yield type(module)
        yield tuple(item for item in own.items() if isinstance(item[1], SCALARS))
        yield id(own.get("_packed")), id(own.get(BACKEND_ATTRIBUTE))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            for plain in () if tensor is None else plain_tensors(tensor):
                yield plain.data_ptr(), plain.dtype, plain.shape
