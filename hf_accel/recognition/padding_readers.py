"""Whether a model holds code of others, which may read what stands at padding."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from operator import is_
from typing import Any

from torch import nn

from .unchanged import GLOBAL_HOOKS, HOOKS, Surroundings, others_code


class PaddingReaders:
    """The code of others in a model, as passes with padding ask for it. It is looked at again once something changes.

    Parts of the model hold this, so that it does not hold the model. A copy belongs to the copy of the model.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._around: Surroundings | None = None
        self._places: list[Mapping[Any, Any]] = []  # of hooks
        self._hooks: list[Any] = []
        self._any = True

    def __bool__(self) -> bool:
        """Return whether there are any, or nobody knows: the model is gone, or a part of it was copied alone."""
        model = self._model and self._model()
        if model is None:
            return True
        hooks = self._hooks_now()
        same = len(hooks) == len(self._hooks) and all(map(is_, hooks, self._hooks))
        if not same or self._around is None or not self._around.hold():
            modules = [*model.modules()]
            self._around, self._any = Surroundings(modules), others_code(modules) is not None
            self._places = [*GLOBAL_HOOKS, *(vars(module)[name] for module in modules for name in HOOKS)]
            self._hooks = self._hooks_now()
        return self._any

    def _hooks_now(self) -> list[Any]:
        return [hook for place in filter(None, self._places) for hook in place.values()]

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddingReaders:
        model = self._model and self._model()
        return PaddingReaders(None if model is None else memo.get(id(model)))

    def __reduce__(self) -> Any:
        return PaddingReaders, (self._model and self._model(),)
