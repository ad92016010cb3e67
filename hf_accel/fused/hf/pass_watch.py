"""Looks once, at the beginning of a pass, for all decoder layers that run by their trace."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...recognition.unchanged import Surroundings
from ...undo.state import FUSED
from ..traced_layer import TracedLayer
from .layer_calls import LayerCalls, TracedForward

NONE_KNOWN: frozenset[TracedLayer] = frozenset()


class PassWatch:
    """Says at the beginning of a pass whether anything can change within it, and which layers are unchanged.

    Only code of others can change something: a hook on any module, a forward on a module, a module or a function that
    is not of a known package. A copy or a pickle of a watch has seen nothing.
    """

    def __init__(self) -> None:
        self._around: Surroundings | None = None
        self._calls: list[LayerCalls[Any]] = []
        self._programmes: list[TracedLayer | None] = []

    def begin(self, model: nn.Module, own_hook: object) -> frozenset[TracedLayer]:
        """Return the programmes of layers that need not be asked in the pass that begins.

        own_hook: a hook that changes nothing.
        """
        if self._around is None:
            self._look(model, own_hook)
        if not self._calls:
            return NONE_KNOWN
        if [calls.programme for calls in self._calls] != self._programmes or not self._around.hold():  # type: ignore[union-attr]
            self._look(model, own_hook)
        known = [programme for programme in self._programmes if programme is not None]
        if not known or not self._around.is_quiet():  # type: ignore[union-attr]
            return NONE_KNOWN
        # A layer that has changed may hold code of others, which runs in this pass.
        if not all(programme.is_current() and programme.is_unobserved() for programme in known):
            return NONE_KNOWN
        return frozenset(known)

    def _look(self, model: nn.Module, own_hook: object) -> None:
        layers = [module for module in model.modules() if isinstance(module, TracedForward)]
        self._calls = [vars(layer)[FUSED] for layer in layers]
        self._programmes = [calls.programme for calls in self._calls]
        # A trace has read all modules inside its layer, and notices their changes.
        traced = zip(layers, self._programmes, strict=True)
        inside = {child for layer, programme in traced if programme is not None for child in [*layer.modules()][1:]}
        for programme in self._programmes:
            inside -= {child for called in getattr(programme, "called", ()) for child in called.modules()}
        self._around = Surroundings([m for m in model.modules() if m not in inside], own_hook)

    def __reduce__(self) -> Any:
        return PassWatch, ()
