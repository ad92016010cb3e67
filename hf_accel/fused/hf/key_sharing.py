"""Keys and values that a layer's native call leaves for later layers, which read the same pages."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...cache.hf import PAGED_HANDLE
from ...cache.hf.layers import LayerOverPages, PagedKV
from ...recognition.call_form import SHARED_KEYS
from ..traced_layer import TracedLayer
from .running_pass import LayerPlace


class LeftKeys:
    """Stands for the K and V [B, H, T, D] that a pass has written to the pages of a layer. Code that takes it apart
    gets these, as the cache would have returned them.
    """

    def __init__(self, pages: LayerOverPages, place: LayerPlace, batch: int) -> None:
        self.layer, self.step, self._group_step, self._batch = pages, place.step, place.group_step, batch

    def __iter__(self) -> Iterator[Tensor]:
        storage = self.layer.group.storages[self.layer.layer_idx]
        keys, values = (
            self.step.columns(each, self._batch).transpose(1, 2) for each in storage.read(self._group_step.slots)
        )
        contiguous = self.step.contiguous[self.layer.group_index]
        yield PagedKV(self.layer, storage, self.step, self._group_step, contiguous, values).attach(keys)
        yield values


def may_share(programme: TracedLayer, pages: LayerOverPages, place: LayerPlace) -> bool:
    """Return whether a layer may leave its keys and values in this pass, and finds those of others where it takes
    them.
    """
    if programme.leaves is None and programme.taken is None:
        return True
    shared = place.kwargs.get(SHARED_KEYS)
    if not isinstance(shared, (dict, UserDict)):
        return False
    if programme.leaves is not None and place.group_step.written is not None:  # those of some tokens are not kept
        return False
    if programme.taken is None:
        return True
    found: Any = shared.get(programme.taken.name)
    if isinstance(found, tuple) and len(found) == 2:
        found = getattr(found[0], PAGED_HANDLE, None)
    return isinstance(found, (LeftKeys, PagedKV)) and found.layer is pages and found.step is place.step


def leave(programme: TracedLayer, pages: LayerOverPages, place: LayerPlace, batch: int) -> None:
    """Leave the keys and values of a native call for other layers, if its code does."""
    if programme.leaves is not None:
        place.kwargs[SHARED_KEYS][programme.leaves] = LeftKeys(pages, place, batch)
