"""PagedLayer: one layer of a PagedCache, which stores K and V in pages and gives copies of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..padded import last_columns
from ..step import Step
from .layers import LayerOverPages, as_attended, read_with_zeros

COPIED = (
    "are a copy of what is in pages, and nothing that is written to them reaches these; to edit keys and values, give "
    "the model past_key_values=DynamicCache(config=model.config), or generate() cache_implementation='dynamic'"
)


class PagedLayer(LayerOverPages):
    """One layer of a PagedCache. num_columns: the columns that this layer was updated with."""

    is_croppable = True
    supports_early_init = False
    num_columns = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # What was read last of K and of V since the last pass, with the number of writes to it.
        self.copies: dict[int, tuple[Tensor, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**{name: value for name, value in vars(self).items() if name != "cache"}, "copies": {}}

    @property
    def is_sliding(self) -> bool:
        return self.group.window is not None

    @property
    def keys(self) -> Tensor | None:
        return self._copy(0)

    @keys.setter
    def keys(self, value: Any) -> None:
        raise UnsupportedError(f"the keys of layer {self.layer_idx} {COPIED}")

    @property
    def values(self) -> Tensor | None:
        return self._copy(1)

    @values.setter
    def values(self, value: Any) -> None:
        raise UnsupportedError(f"the values of layer {self.layer_idx} {COPIED}")

    def _copy(self, half: int) -> Tensor | None:
        """Return a copy of K or V of all columns, and note it, so that a write to it does not go unseen."""
        if not self.group.has_columns(self.layer_idx):
            return None
        self.check_copies(half)
        with torch.inference_mode(False), torch.no_grad():  # the copy counts writes, which inference tensors do not
            copied = self.columns()[half]
        self.copies[half] = copied, copied._version
        return copied

    def check_copies(self, *halves: int) -> None:
        """Forget the copies of K (0) and V (1). Raises UnsupportedError if somebody has written to one."""
        copies = [self.copies.pop(half, None) for half in halves]
        if any(each is not None and each[0]._version != each[1] for each in copies):
            raise UnsupportedError(f"somebody has written to keys or values of layer {self.layer_idx}, which {COPIED}")

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store K and V [B, Hkv, Q, D], and return the K and V for attention.

        In a patched model these are the given K and V, and K carries a PagedKV. In another model they are gathered
        from all columns, [B, Hkv, T, D], as any attention function expects.
        """
        keys, values = as_attended(key_states, value_states)
        step = self.cache.step_for(self, keys)
        handle = self.store(step, keys, values)
        self.pass_done(step)
        if not step.gathers:
            return handle.attach(keys), values
        keys, values = self.columns()
        return keys.contiguous(), values.contiguous()  # as DynamicCache's, which some code takes views of

    def slots_seen(self, step: Step) -> Tensor:
        # Padding is a token of zeros to a convolution, as it is in transformers.
        slots = self.cache.column_slots(self.group_index, step.groups[self.group_index].slots.device)
        return last_columns(slots, step.num_columns, self.group.window or 1)

    def prepared_step(self) -> Step | None:
        step = super().prepared_step()
        if step is None or step.gathers or self.num_columns + step.num_columns != self.cache.padded.num_columns:
            return None
        return step

    def pass_done(self, step: Step) -> None:
        self.num_columns += step.num_columns

    def columns(self) -> tuple[Tensor, Tensor]:
        """Gather K and V of all columns, [B, Hkv, T, D], with zeros in the padding and behind the window.

        Raises UnsupportedError where ranks share out the blocks.
        """
        if self.group.context is not None:
            raise UnsupportedError(
                f"the attention of layer {self.layer_idx} needs all keys and values at once, and ranks share them out "
                "here; patch this model without context_parallel="
            )
        storage = self.group.storages[self.layer_idx]
        slots = self.cache.column_slots(self.group_index, storage.pages.k.device)
        keys, values = self.group.form.parted(*read_with_zeros(storage, slots))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.num_columns

    def offload(self) -> None:
        raise UnsupportedError("a paged cache cannot be offloaded; use stock's DynamicCache(offloading=True)")

    prefetch = offload
