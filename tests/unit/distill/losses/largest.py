"""Sees every tensor that is made, in backward too, without asking the process for its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """bytes: of the storages made while it was on, the largest first. Views and in-place results are no new ones."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, torch.UntypedStorage] = {}  # kept, so that no address comes back

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage(x)._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in (storage(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
            if made._cdata not in given:
                self._made[made._cdata] = made
        return result

    @property
    def bytes(self) -> list[int]:
        return sorted((made.nbytes() for made in self._made.values()), reverse=True)


def storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
