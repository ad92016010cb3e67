"""Session: a Batcher over a patched model, its pages and its drafters. Everything that generates uses it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ...cache.hf import PagedCache, page_groups
from ...cache.pages import CachedSequence, Pages
from ...config import CacheConfig, SpeculativeConfig
from ..batcher import Batcher
from ..sequence import Sequence
from ..speculation.controller import Controller
from ..speculation.speculation import Speculation
from .drafting import keep_controller, make_speculation
from .model_runner import ModelRunner, weights_salt


class Session(Batcher):
    """Generates sequences with one model: add() them, call step() until has_work is False, and close().

    generate(), generate_batch(), the Engine, transformers' manager interface and the decoder of distillation each use
    a Session. The model's weights may change while there are no sequences; prefixes that were cached before are then
    not used.

    cache: the settings for new pages, or a PagedCache whose pages are used. controller: chooses the draft lengths;
    left out, it is a controller with what earlier sessions of the model have learnt.

    Raises UnsupportedError for a drafter that cannot draft for this model.
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
        if isinstance(cache, PagedCache):
            pages, group_of_layer = cache.pages, cache.group_of_layer
        else:
            groups, group_of_layer = page_groups(model.config, cache)
            pages = Pages(groups)
        runner = ModelRunner(model, pages.groups, group_of_layer)
        speculation = Speculation() if speculative is None else make_speculation(speculative, runner, pages)
        if controller is not None:
            speculation.controller = controller
        super().__init__(runner, pages, speculation, token_budget=token_budget, max_running=max_running)
        self.model = model
        self._learns = speculative if controller is None else None

    def add(self, sequence: Sequence, cached: CachedSequence | None = None) -> None:
        """Add a sequence; see Batcher.add. Prefixes of other weights are dropped if there is no other sequence."""
        if not self.has_work:
            self.pages.use_salt(weights_salt(self.model))
        super().add(sequence, cached)

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of passes, pages and speculation."""
        speculation = self.speculation.statistics.to_dict() if self.speculation.drafters else {}
        return {**super().statistics(), "speculation": speculation}

    def close(self) -> None:
        """End all sequences, and keep the controller for the next session."""
        super().close()
        if self._learns is not None:
            keep_controller(self._learns, self.speculation, self.model)
