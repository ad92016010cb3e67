"""The bases of what is known of modules that keep something else than keys and values, in traced decoder layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from ..attention import AttentionSpec
from ..cache.kinds.state_sizes import StateSizes
from ..recognition.stand_ins import StandIn


class Recorded(ABC):
    """Knows what a module that keeps something in pages computes, and records it in the trace of its layer."""

    @abstractmethod
    def recorded(self, trace: Any, module: Any, *args: Any, **given: Any) -> StandIn:
        """Record a call of the module, and return what it returns. Raises UntraceableError if it is not known.

        trace: of the layer, which gets the module and what is known of it, if it keeps states.
        """

    @abstractmethod
    def refusal(self, module: Any) -> str | None:
        """Return why the module cannot be computed over pages as it is now, as one clause; None if it can."""


class KeptStates(Recorded):
    """Knows what a module with states of fixed size computes."""

    @abstractmethod
    def sizes(self, module: Any) -> StateSizes:
        """Return the numbers that the module keeps of a token."""

    @abstractmethod
    def layer_of(self, module: Any) -> int:
        """Return the index of the decoder layer that the module is in."""


NO_STATES: Mapping[nn.Module, Recorded] = MappingProxyType({})


class Keepers(NamedTuple):
    """The modules of decoder layers that keep something in pages.

    attention: the specs of those that attend; on the CPU, by the native kernels. tried: what a trial has shown
    of those that attend by operators. states: what is known of those that keep something else.
    """

    attention: Mapping[nn.Module, AttentionSpec]
    tried: Mapping[nn.Module, Any] = MappingProxyType({})
    states: Mapping[nn.Module, Recorded] = NO_STATES
