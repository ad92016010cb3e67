"""PagedCache: the paged KV cache as a transformers Cache."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...config import CacheConfig
from ...errors import UnsupportedError
from ...keywords import check_keywords
from ..cached_sequence import CachedSequence
from ..group import PageGroup
from ..padded import PaddedBatch
from ..pages import Pages
from ..step import SharedContext, Step
from .kept import KeptOnDisk
from .kinds import FIRST_TOKENS, REMADE, check_windows, model_kinds, page_groups, refuse_sources, windows_of_pages
from .layers import CacheOverPages
from .paged_layer import PagedLayer


class PagedCache(CacheOverPages, KeptOnDisk):
    """A KV cache in blocks, with reference counts, copy-on-write and prefix sharing.

    Give it to a model as `past_key_values=`, or let `hf_accel.patch` do it. In a patched model, padding takes no
    blocks and attention reads the pages. In another model, the cache behaves as DynamicCache does.

        cache = hf_accel.PagedCache(model.config, dtype="int8")
        model.generate(**inputs, past_key_values=cache)

    config: the model's config, which gives the number of layers and their sliding windows. keywords: the fields of
    hf_accel.CacheConfig. capacity: the tokens, over all sequences, that a growing cache has room for at first.
    context: the ranks that share out its blocks; patch(context_parallel=) gives it to the caches of generate().
    Raises UnsupportedError for a model whose layers it cannot hold, and for unknown keywords.
    The method is PagedAttention (Kwon et al. 2023, arXiv 2309.06180).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        cache_config: CacheConfig | None = None,
        *,
        capacity: int = FIRST_TOKENS,
        context: SharedContext | None = None,
        **keywords: Any,
    ) -> None:
        if keywords:
            if cache_config is not None:
                raise UnsupportedError("give PagedCache a CacheConfig or its keywords, not both")
            known = [*(field.name for field in dataclasses.fields(CacheConfig)), "cache_config", "capacity", "context"]
            check_keywords("PagedCache", keywords, known, {"max_cache_len": "max_tokens="})
        settings = CacheConfig(**keywords) if cache_config is None else cache_config
        refuse_sources(config)
        groups, groups_of_layer = page_groups(config, settings, capacity=capacity, context=context)
        self._bind(settings, PaddedBatch(Pages(groups)), groups_of_layer)
        self._checked_config: PreTrainedConfig | None = config

    @classmethod
    def over(
        cls,
        groups: list[PageGroup],
        groups_of_layer: list[tuple[int, ...]],
        settings: CacheConfig,
        config: PreTrainedConfig,
    ) -> PagedCache:
        """Make an empty cache over pages that were made for the same settings and config, and that nobody uses."""
        cache = object.__new__(cls)
        (pages := Pages(groups)).clear_prefixes()  # so that equal calls compute the same
        cache._bind(settings, PaddedBatch(pages), groups_of_layer)
        cache._checked_config = config
        return cache

    def check_config(self, config: PreTrainedConfig) -> None:
        """Raise UnsupportedError unless the cache has the layers and sliding windows of this model's config.

        An empty cache takes other pages if these were changed in the config for which it was made.
        """
        self._check_copies()
        is_known = config is self._checked_config
        if is_known and self.padded.num_columns:
            return
        own = windows_of_pages(self.pages.groups, self.groups_of_layer)
        if is_known and own != model_kinds(config).windows:
            groups, groups_of_layer = page_groups(config, self.settings, context=self.pages.groups[0].context)
            self._bind(self.settings, PaddedBatch(Pages(groups)), groups_of_layer)
        elif not is_known:
            check_windows(own, config)
        self._checked_config = config

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Update a layer, see Cache.update. Raises UnsupportedError for a layer that the cache does not have."""
        if layer_idx >= len(self.layers):
            raise UnsupportedError(
                f"the PagedCache is for {len(self.layers)} layers, and the model has more; {REMADE}"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _bind(self, settings: CacheConfig, padded: PaddedBatch, groups_of_layer: list[tuple[int, ...]]) -> None:
        self.settings, self.padded, self.groups_of_layer = settings, padded, groups_of_layer
        self.step: Step | None = None
        self._column_slots: dict[int, Tensor] = {}  # of each group, those of the current pass
        super().__init__(layers=self._lay_out(PagedLayer, padded.pages.groups, groups_of_layer))

    @property
    def pages(self) -> Pages:  # type: ignore[override]
        return self.padded.pages

    # -- a forward pass --------------------------------------------------------------------------------

    def prepare(
        self,
        batch_size: int,
        num_new: int,
        *,
        device: torch.device,
        mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        salt: bytes | None = None,
    ) -> Step:
        """Prepare the next forward pass of a patched model; see PaddedBatch.prepare.

        salt: identifies what K and V depend on besides the tokens (weights, adapters). Prefixes that were cached with
        another salt are dropped.
        """
        self._settle()
        if salt is not None:
            self.pages.use_salt(salt)
        self.step = self.padded.prepare(batch_size, num_new, device=device, mask=mask, token_ids=token_ids)
        return self.step

    def _settle(self) -> None:
        """Undo the last forward pass if it did not reach every layer.

        Raises UnsupportedError if a layer's attention did not read the pages.
        """
        self.check_read()
        self._check_copies()
        self._column_slots.clear()
        self.step = None
        if self._is_unfinished:
            self.padded.take_back()
            self._set_columns()

    def _check_copies(self) -> None:
        for layer in self.paged_layers:
            if layer.copies:
                layer.check_copies(0, 1)

    @property
    def _is_unfinished(self) -> bool:
        """True if a pass was prepared that did not reach every layer."""
        return any(x.is_followed and x.num_columns != self.padded.num_columns for x in self.paged_layers)

    def step_for(self, layer: PagedLayer, keys: Tensor) -> Step:
        """Return the Step for a layer's update.

        A patched model has prepared it. For another model it is made here, with every column as a token.
        """
        self.check_read()
        if self.step is None or layer.num_columns + self.step.num_columns != self.padded.num_columns:
            self._refuse_unwritten()
            self.step = self.prepare(keys.shape[0], keys.shape[2], device=keys.device)
            self.step.gathers = True
        return self.step

    def _refuse_unwritten(self) -> None:
        """Raise UnsupportedError if a layer was never updated.

        Otherwise the pass would look unfinished, and `prepare` would undo it.
        """
        missed = [layer.layer_idx for layer in self.paged_layers if layer.layer_idx not in layer.group.storages]
        if missed and self.padded.num_columns:
            raise UnsupportedError(
                f"layer {missed[0]} of the PagedCache got no keys and values: if the model has fewer layers, "
                f"{REMADE}; if its first pass was interrupted, call the cache's reset() first"
            )

    def column_slots(self, group_index: int, device: torch.device) -> Tensor:
        """Return PaddedBatch.column_slots, which is computed once for each group and pass."""
        if group_index not in self._column_slots:
            self._column_slots[group_index] = self.padded.column_slots(group_index, device)
        return self._column_slots[group_index]

    def adopt_prefix(self, token_ids: Tensor, mask: Tensor | None, salt: bytes) -> int:
        """Start sequences with the cached blocks of these prompts; see PaddedBatch.adopt_prefix."""
        self._settle()
        self.pages.use_salt(salt)
        skipped = self.padded.adopt_prefix(token_ids, mask)
        self._set_columns()
        return skipped

    def replace_sequences(self, sequences: list[CachedSequence], token_mask: Tensor | None, num_columns: int) -> None:
        """Release the cache's sequences, and hold these B sequences in their place.

        token_mask: [B, num_columns] bool, False for padding; None if there is no padding.
        """
        self._settle()
        (padded := self.padded).reset()
        padded.sequences, padded.token_mask, padded.num_columns = sequences, token_mask, num_columns
        self._set_columns()

    @property
    def has_prefixes(self) -> bool:
        return self.pages.prefixes is not None and not self.pages.prefixes.is_empty

    def _set_columns(self) -> None:
        self._column_slots.clear()
        for layer in self.paged_layers:
            layer.num_columns = self.padded.num_columns

    # -- transformers' Cache protocol ------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns. The number is negative, as in transformers 5."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}) must be negative: it counts the tokens to remove from the end")
        self._settle()
        # int(), because the assisted loop of older transformers passes a tensor.
        self.padded.crop(-int(tokens_to_remove))
        self._set_columns()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices([i for i in range(len(self.padded.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        self._settle()
        self.padded.select(torch.as_tensor(indices).tolist())

    def reset(self) -> None:
        """Release the sequences. Cached prefixes stay for the next call (see CacheConfig.prefix_sharing)."""
        self.unread = None
        for layer in self.paged_layers:
            layer.copies.clear()
        self._settle()
        self.padded.reset()
        self._set_columns()

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Yield what DynamicCache yields for each layer: copies of its K and V, and the size of its window."""
        for layer in self.layers:
            group = getattr(layer, "group", None)
            window = None if group is None or group.window is None else torch.tensor(group.window)
            yield getattr(layer, "keys", None), getattr(layer, "values", None), window

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """Return a fork, which shares the pages. A shared block is copied before either cache writes to it."""
        self._settle()
        fork = object.__new__(type(self))
        memo[id(self)] = fork
        fork._bind(self.settings, self.padded.fork(), self.groups_of_layer)
        fork._checked_config = self._checked_config
        fork._set_columns()
        return fork

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for layer in self.paged_layers:
            layer.attach(self)

    def __copy__(self) -> PagedCache:
        return copy.deepcopy(self)

    def __del__(self) -> None:
        # A fork that shares the pages can use the released blocks. reset() is not called, because torch aborts the
        # program when its operators are called while the interpreter ends.
        if "paged_layers" in vars(self):
            if self._is_unfinished:
                self.padded.take_back()
            self.padded.reset()

    @property
    def is_initialized(self) -> bool:
        """True if the cache holds tokens: some models take a pass over an empty one for the first over a prompt."""
        return self.get_seq_length() > 0

    @property
    def batch_size(self) -> int:
        return len(self.padded.sequences) or -1

    # -- statistics ------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, float | int]:
        """Count blocks, bytes and prefix hits. `waste` is the share of allocated slots that hold no token."""
        return {
            "block_size": self.settings.block_size,
            "kv_bytes": round(sum(group.used_bytes for group in self.pages.groups)),
            "waste": self.pages.waste(self.padded.sequences),
            **self.pages.statistics(),
        }
