"""Modes of a model that last as long as a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """No dropout meanwhile; then every module is in the mode it was in."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
