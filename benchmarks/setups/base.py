"""What a setup is."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from typing import Any

from transformers import DynamicCache, PreTrainedModel


class Setup(ABC):
    """One way to run a model.

    tolerance: what its logits may differ from stock's, relative to their norm; more and it is not timed. Random
        weights spread rounding errors from layer to layer more than trained ones do.
    exact: its greedy tokens must be stock's, but for near-ties.
    is_peer: another library, which quick runs leave out.
    """

    name: str
    tolerance: float
    exact: bool = False
    is_peer: bool = False

    def refuses(self) -> str | None:
        """None, or why it cannot run here."""
        return None

    @abstractmethod
    def prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model, changed in place or loaded anew; its Parameters belong to others too and stay as they are."""

    def new_cache(self, model: PreTrainedModel) -> Any:
        return DynamicCache(config=model.config)


def missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{package} is not installed"
