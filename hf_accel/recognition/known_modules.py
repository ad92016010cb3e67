"""The kinds of modules that a trial of their code knows; a new one is a file and its place in this list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..models import answer_once
from .distance_attention import DISTANCE_MODULES
from .gated_bias import GATED_MODULES
from .known_module import KnownModule
from .paired_rotation import PAIR_MODULES
from .position_attention import POSITION_MODULES
from .rotated_inputs import ROTATED_MODULES
from .row_convolution import CONVOLUTION_MODULES
from .windowed_attention import WINDOW_MODULES

KNOWN_MODULES = (
    POSITION_MODULES, GATED_MODULES, DISTANCE_MODULES, CONVOLUTION_MODULES, PAIR_MODULES, WINDOW_MODULES,
    ROTATED_MODULES,
)  # fmt: skip
INPUTS = frozenset(name for kind in KNOWN_MODULES for name in kind.inputs)


def other_calls(layers: Iterable[nn.Module]) -> list[str]:
    """Return which calls of layers are stock's because of the modules in them, each as the end of a list."""
    found = (known_module(module) for layer in layers for module in layer.modules())
    return sorted({each[0].others for each in found if each is not None and each[0].others})


def known_module(module: nn.Module) -> tuple[KnownModule, Any] | None:
    """Return the kind that a module is of, and what is known of it; None if it is of none."""
    return answer_once(_known, module)


def _known(module: nn.Module) -> tuple[KnownModule, Any] | None:
    return next(((kind, parts) for kind in KNOWN_MODULES if (parts := kind.parts(module))), None)
