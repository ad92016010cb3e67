"""Session: a Batcher over a patched model, its pages and its drafters. Everything that generates uses it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ...attention import PlannedAttention
from ...cache.block_folder import BlockFolder
from ...cache.cached_sequence import CachedSequence
from ...cache.hf import PagedCache, fixed_settings, model_kinds, page_groups, windows_of_pages
from ...cache.kinds.once import require_room
from ...cache.pages import Pages
from ...cache.step import TokenRange
from ...config import CacheConfig, SpeculativeConfig
from ...errors import LostRankError
from ...models import vocabulary_size
from ...tensors import model_device
from ...undo.state import BACKEND_ATTRIBUTE, find_state, state_of
from .. import graphs
from ..batcher import Batcher, Progress
from ..prompt_inputs import RequestInputs
from ..sequence import Sequence
from ..speculation.controller import Controller
from ..speculation.drafters.forced import ForcedDrafter
from ..speculation.drafters.model import ModelDrafter
from ..speculation.speculation import Speculation
from ..speculation.verifiers import verifier
from .drafting import keep_controller, make_speculation, refuse_drafts, remake_drafts
from .encoder_decoder_runner import EncoderDecoderRunner
from .graphed_runner import GraphedRunner, make_runner
from .kept_prefixes import KeptPrefixes
from .model_runner import ModelRunner, weights_salt
from .prompts import read_inputs

# How often a session that works looks whether its model has changed. A look at a model of 1.1 billion parameters takes
# 3 ms, most of which are reads of weights that are in no cache; a pass may begin just before a look is due, and
# prefixes must not be old for a second.
LOOK_SECONDS = 0.75
A_PASS = "it computed a pass of the model"  # for the error if a process that shares the model does not answer
MOST_FORCED = 16  # tokens of a draft, where nothing else is drafted
DEFAULT_ROWS = 2048  # of the largest pass, where there is no token budget


class Session(Batcher):
    """Generates sequences with one model: add() them, call step() until has_work is False, and close().

    generate(), generate_batch(), the Engine, transformers' manager interface and the decoder of distillation each use
    a Session. The model may change: prefixes that were cached before are not used by a sequence that is added when
    there is no other, nor, after at most LOOK_SECONDS and a pass, by any. Sequences that run go on with the K and V
    that they have, and share these with no other.

    cache: the settings for new pages, or a PagedCache whose pages are used. controller: chooses the draft lengths;
    left out, it is a controller with what earlier sessions of the model have learnt.

    Raises UnsupportedError for a drafter that cannot draft for this model, or a model whose prompts cannot stay, and
    OutOfBlocksError if a GPU has too little free memory for new pages.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheConfig | PagedCache,
        *,
        speculative: SpeculativeConfig | None = None,
        token_budget: int | None = None,
        max_running: int | None = None,
        controller: Controller | None = None,
    ) -> None:
        state = state_of(model).generation
        token_budget = min(filter(None, (token_budget, state.form.most_tokens)), default=None)
        keywords = {
            "speculative": speculative, "token_budget": token_budget, "max_running": max_running,
            "controller": controller,
        }  # fmt: skip
        self._given: Any = None if isinstance(cache, PagedCache) else (cache, keywords)  # makes its pages again
        kept = None
        if isinstance(cache, PagedCache):
            pages, groups_of_layer = cache.pages, cache.groups_of_layer
            kept, cache.runner = cache.runner, None
        else:
            settings = _fixed(model, cache, token_budget, speculative)
            tokens = settings.max_tokens
            if tokens is not None:  # of as much memory as this process has free
                shares = state.context.size if state.context is not None and cache.max_tokens is None else 1
                settings = replace(settings, max_tokens=state.agreement.least(tokens) * shares)
            groups, groups_of_layer = page_groups(model.config, settings, context=state.context)
            pages = Pages(groups)
        rows = state.invariant_rows
        if model_device(model).type in graphs.DEVICES:
            passes = make_runner(model, pages.groups, groups_of_layer, rows, kept=kept)
        else:
            kind = EncoderDecoderRunner if model.config.is_encoder_decoder else ModelRunner
            passes = kind(model, pages.groups, groups_of_layer)
        speculation = None
        if speculative is not None:
            refuse_drafts(model, speculative)
            speculation = make_speculation(speculative, passes, pages, controller)
        super().__init__(
            passes, pages, speculation, token_budget=token_budget, max_running=max_running, agreement=state.agreement
        )
        self.model, self._groups_of_layer = model, groups_of_layer
        self._looked, self._declared = float("-inf"), state.watch.declared
        self._learns = speculative if controller is None else None
        self._kept: KeptPrefixes | None = None
        if isinstance(cache, CacheConfig) and cache.directory is not None:
            folder = BlockFolder(cache.directory, cache.directory_bytes)
            self._kept = KeptPrefixes(model, pages, folder, self._first_pass)
            self._look()

    def add(self, sequence: Sequence, cached: CachedSequence | None = None) -> None:
        """Add a sequence; see Batcher.add. Prefixes of another model are dropped if there is no other sequence.

        What the request brings besides its tokens is read here, so that no tower and no encoder runs during a pass.
        """
        if not self.has_work:
            state_of(self.model).generation.watch.check_files()
            self._fit_windows()
            self._look()
            if self._kept is not None:
                self._kept.wait()
        if self.agreement.size > 1:
            self._agree_on(sequence)
        if sequence.constraint is not None:
            self._draft_forced()
        if sequence.inputs is None and state_of(self.model).generation.form.reads_texts:
            given = RequestInputs({})
            for each in (sequence, *sequence.followers):
                each.inputs = given
        if sequence.inputs is not None and sequence.inputs.unread is not None:
            read_inputs(self.model, sequence.tokens, sequence.inputs)
        if sequence.source is not None:
            require_room(self.pages.groups, sequence.source)
        super().add(sequence, cached)

    def _draft_forced(self) -> None:
        """Draft what constraints force before all else, from the first sequence on that has one."""
        if self.speculation is None:
            state = state_of(self.model).generation
            self.speculation = Speculation(
                verifier("token"), [], Controller(MOST_FORCED), invariant_rows=state.invariant_rows,
                agreement=state.agreement, num_tokens=vocabulary_size(self.model),
            )  # fmt: skip
        if not any(isinstance(drafter, ForcedDrafter) for drafter in self.speculation.drafters):
            self.speculation.drafters.insert(0, ForcedDrafter())

    def _fit_windows(self) -> None:
        """Begin again, with other pages, if the sliding windows in the model's config were changed."""
        windows = windows_of_pages(self.pages.groups, self._groups_of_layer)
        if self._given is None or windows == model_kinds(self.model.config).windows:
            return
        self.close()
        for group in self.pages.groups:
            group.storages.clear()
        cache, keywords = self._given
        Session.__init__(self, self.model, cache, **keywords)

    def look_again(self) -> None:
        """Look at the model before the next pass."""
        self._looked = float("-inf")

    def _look(self) -> None:
        """Drop the prefixes, and all else that was made from the model, if the model has changed."""
        self._looked, declared = time.monotonic(), state_of(self.model).generation.watch.declared
        self.pages.use_salt(salt := weights_salt(self.model))
        if self._kept is not None:
            self._kept.look(salt)
        if declared != self._declared:
            if self.speculation is not None:
                remake_drafts(self.speculation, self.model)
            self._declared = declared
        for runner in self._runners:
            if (state := find_state(runner.model)) is not None and runner is not self.runner:
                state.generation.watch.look(runner.model)
            runner.check_model(None if state is None else state.generation.watch.reading)

    def _is_due(self) -> bool:
        """Return whether to look at the model now, in all processes at once."""
        declared = state_of(self.model).generation.watch.declared
        due = time.monotonic() - self._looked >= LOOK_SECONDS or declared != self._declared
        return due if self.agreement.size == 1 else not self.agreement.least(int(not due))

    def _agree_on(self, leader: Sequence) -> None:
        """Give a sequence and its followers the same seeds in all processes, which must have the same tokens."""
        group = (leader, *leader.followers)
        tokens, seeds = self.agreement.agree((leader.tokens, [sequence.seed for sequence in group]))
        if tokens != leader.tokens or len(seeds) != len(group):
            raise LostRankError(
                f"this rank was given another prompt ({len(leader.tokens)} tokens, {len(group)} samples) than rank 0 "
                f"({len(tokens)} tokens, {len(seeds)} samples); make the same calls in the same order on all ranks"
            )
        for sequence, seed in zip(group, seeds, strict=True):
            sequence.seed = seed

    def step(self) -> list[Progress]:
        """See Batcher.step. Raises LostRankError if a process that shares the model does not answer."""
        with contextlib.nullcontext() if self.agreement.size == 1 else self.agreement.watching(A_PASS):
            if self._is_due():
                self._look()
            progress = super().step()
            if self._kept is not None and not self.has_work:
                self._look()  # so that what was computed is written
            return progress

    @torch.no_grad()
    def _first_pass(self) -> None:
        """Compute one token, so that all layers have pages, and forget it."""
        sequence = self.pages.begin()
        try:
            self.pages.append(sequence, 1)
            self.runner([0], [0], self.pages.step([TokenRange(sequence, 0, 1)]), [0])
        finally:
            sequence.release()

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of passes, pages and speculation."""
        speculation = {} if self.speculation is None else self.speculation.statistics.to_dict()
        kept = {} if self._kept is None else self._kept.folder.statistics()
        return {**super().statistics(), "speculation": speculation, **kept, **self.graph_statistics()}

    def graph_statistics(self) -> dict[str, Any]:
        """Return the statistics of the model's graphs as "graphs", or nothing on a device that has none."""
        if not isinstance(self.runner, GraphedRunner):
            return {}
        return {"graphs": {**self.runner.statistics.to_dict(), "ahead": self.ahead.statistics()}}

    def _free_memory(self) -> bool:
        """Drop the graphs, which can be done without."""
        freed = [runner.free_graphs() for runner in self._runners]
        return any(freed)

    @property
    def _runners(self) -> list[GraphedRunner]:
        """Return the runners that have graphs: that of the model, and those of draft models."""
        drafters = [] if self.speculation is None else self.speculation.drafters
        found = [self.runner, *(drafter.runner for drafter in drafters if isinstance(drafter, ModelDrafter))]
        return [runner for runner in found if isinstance(runner, GraphedRunner)]

    def close(self) -> None:
        """End all sequences, and keep the controller for the next session."""
        super().close()
        if self._kept is not None:
            self._kept.close()
        if self._learns is not None and self.speculation is not None:
            keep_controller(self._learns, self.speculation, self.model)


def with_pages_for(
    model: Any,
    settings: CacheConfig,
    *,
    most_tokens: int,
    speculative: SpeculativeConfig | None,
    token_budget: int | None,
) -> CacheConfig:
    """Return the settings of pages which never hold more tokens, where they would take all memory of a GPU."""
    if settings.max_tokens is not None or state_of(model).generation.agreement.size > 1:
        return settings
    tokens = _fixed(model, settings, token_budget, speculative).max_tokens
    return settings if tokens is None else replace(settings, max_tokens=min(tokens, most_tokens))


def _fixed(
    model: Any, settings: CacheConfig, token_budget: int | None, speculative: SpeculativeConfig | None
) -> CacheConfig:
    drafters = [] if speculative is None else speculative.drafters
    drafts = [drafter for drafter in drafters if isinstance(drafter, PreTrainedModel)]
    rows, own_heads = token_budget or DEFAULT_ROWS, heads_of_rank(model)
    return fixed_settings(model, settings, model_device(model), rows=rows, drafts=drafts, own_heads=own_heads)


def heads_of_rank(model: Any) -> dict[int, int]:
    """Return the planned heads of K and V of each layer of a model that is split over processes; empty for others."""
    state = state_of(model).generation
    if state.agreement.size == 1 or state.context is not None:
        return {}
    planned: dict[int, PlannedAttention] = {
        module.layer_idx: vars(module)[BACKEND_ATTRIBUTE]
        for module in model.modules()
        if BACKEND_ATTRIBUTE in vars(module)
    }
    return {index: one.spec.num_kv_heads for index, one in planned.items()}
