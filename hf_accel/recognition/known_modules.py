"""The kinds of modules that a trial of their code knows; a new one is a file and its place in this list."""

from __future__ import annotations

from typing import Any

from torch import nn

from .distance_attention import DISTANCE_MODULES
from .gated_bias import GATED_MODULES
from .known_module import KnownModule
from .position_attention import POSITION_MODULES
from .row_convolution import CONVOLUTION_MODULES

KNOWN_MODULES = (POSITION_MODULES, GATED_MODULES, DISTANCE_MODULES, CONVOLUTION_MODULES)
INPUTS = frozenset(name for kind in KNOWN_MODULES for name in kind.inputs)


def known_module(module: nn.Module) -> tuple[KnownModule, Any] | None:
    """Return the kind that a module is of, and what is known of it; None if it is of none."""
    return next(((kind, parts) for kind in KNOWN_MODULES if (parts := kind.parts(module))), None)
