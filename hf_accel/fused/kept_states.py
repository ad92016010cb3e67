"""What a traced decoder layer knows of a module in it that keeps states of fixed size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..cache.kinds.state_sizes import StateSizes
from ..recognition.stand_ins import StandIn


class KeptStates(ABC):
    """Knows what a module with states of fixed size computes, and records it in the trace of the layer around it."""

    @abstractmethod
    def sizes(self, module: Any) -> StateSizes:
        """Return the numbers that the module keeps of a token."""

    @abstractmethod
    def layer_of(self, module: Any) -> int:
        """Return the index of the decoder layer that the module is in."""

    @abstractmethod
    def recorded(self, trace: Any, module: Any, *args: Any, **given: Any) -> StandIn:
        """Record a call of the module, and return what it returns. Raises UntraceableError if it is not known.

        trace: of the layer, which gets the module and what is known of it, so that it keeps these states.
        """
