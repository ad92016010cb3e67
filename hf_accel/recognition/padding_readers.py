"""Tells whether a model holds code of others, which may read what stands at padding."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from operator import is_
from typing import Any

from torch import Tensor, nn

from .unchanged import GLOBAL_HOOKS, HOOKS, Surroundings, others_code

MOST_MASKS = 4  # of a pass: layers of several kinds are given one each


class PaddingReaders:
    """The code of others in a model, as passes with padding ask for it. It is looked at again once something changes.

    A copy belongs to the copy of the model; that of a part alone to none.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._around: Surroundings | None = None
        self._places: list[Mapping[Any, Any]] = []  # of hooks
        self._hooks: list[Any] = []
        self._any = True
        self._passes: dict[int, tuple[weakref.ref[Tensor], set[int]]] = {}  # by the id of a mask, who has asked

    def may_read(self, asking: object, mask: Tensor | None) -> bool:
        """Return whether there are any, or nobody knows, since a part was copied alone.

        asking: who asks, once in a pass. mask: what the layers of a pass are given. Without code of others nothing
        changes within a pass, so that only the first of its layers looks.
        """
        seen, asked = self._passes.get(id(mask), (None, set[int]()))
        if seen is not None and seen() is mask and id(asking) not in asked:
            asked.add(id(asking))
            return False
        if self._look() or mask is None or len(self._passes) >= MOST_MASKS:
            self._passes.clear()
        if mask is not None and not self._any:
            self._passes[id(mask)] = weakref.ref(mask), {id(asking)}
        return self._any

    def _look(self) -> bool:
        if self._model is None:
            return True
        hooks = self._hooks_now()
        same = len(hooks) == len(self._hooks) and all(map(is_, hooks, self._hooks))
        if not same or self._around is None or not self._around.hold():
            modules = [*self._model.modules()]
            self._around, self._any = Surroundings(modules), others_code(modules) is not None
            self._places = [*GLOBAL_HOOKS, *(vars(module)[name] for module in modules for name in HOOKS)]
            self._hooks = self._hooks_now()
        return self._any

    def _hooks_now(self) -> list[Any]:
        return [hook for place in filter(None, self._places) for hook in place.values()]

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddingReaders:
        return PaddingReaders(memo.get(id(self._model)))

    def __reduce__(self) -> Any:
        return PaddingReaders, (self._model,)
