"""Session: a patched model, its pages and its drafts, put together once for all who generate."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ...cache.hf import PagedCache, page_groups
from ...cache.pages import CachedSequence, Pages
from ...config import CacheConfig, SpeculativeConfig
from ..batcher import Batcher
from ..sequence import Sequence
from ..speculation.controller import Controller
from .drafting import keep_learnt, make_speculation
from .model_runner import ModelRunner, weights_salt


class Session(Batcher):
    """Computes sequences on one model: add() them, step() until they have ended, read statistics(), close().

    generate(), generate_batch(), the Engine, transformers' manager interface and the decoder of distillation drive one
    each. Weights may change while no sequence is under way: prefixes that were computed before are not found then.

    cache: how the pages are made, or a PagedCache whose pages are used. controller: decides how much is drafted,
    instead of one that goes on with what earlier sessions of the model have learnt.

    Raises UnsupportedError for a drafter that cannot serve this model.
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
        speculation = make_speculation(speculative, runner, pages)
        if controller is not None:
            speculation.controller = controller
        super().__init__(runner, pages, speculation, token_budget=token_budget, max_running=max_running)
        self.model = model
        self._learns = speculative if controller is None else None

    def add(self, sequence: Sequence, cached: CachedSequence | None = None) -> None:
        """cached: holds what is known of the sequence already.

        Raises OutOfBlocksError for a sequence that the pages could never hold.
        """
        if not self.has_work:
            self.pages.use_salt(weights_salt(self.model))
        super().add(sequence, cached)

    def statistics(self) -> dict[str, Any]:
        """Those of the passes and the pages; what speculation did, if there is any."""
        speculation = self.speculation.statistics.to_dict() if self.speculation.drafters else {}
        return {**super().statistics(), "speculation": speculation}

    def close(self) -> None:
        """End what is under way, and keep for the next session what was learnt about drafts."""
        super().close()
        keep_learnt(self._learns, self.speculation, self.model)
