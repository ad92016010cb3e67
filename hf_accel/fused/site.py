"""Modules that get a class of their own when a model is patched, and the words of the plan for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..undo.journal import Mixin


@dataclass(frozen=True)
class SiteKind:
    """A kind of modules that get a class of their own, in the words of the plan.

    modules: what they are. choice: what becomes of them; a kind without one has lines of its own in the plan.
    known_by: why they are known to give the same. else_choice: what becomes of one that is not known. computes_all:
    whether we compute all of their parts then. multiplies: whether we compute all products within them, except for
    those of linear layers, which are called. varies: why the bits of a token depend on what else is computed, as one
    clause; None if they do not.
    """

    name: str
    modules: str = ""
    choice: str = ""
    known_by: str = "checked on random input"
    else_choice: str = "stock"
    computes_all: bool = False
    multiplies: bool = False
    varies: str | None = None


@dataclass(frozen=True)
class FusedSite:
    """A module that gets a class of its own. state: the values that the mixin reads, by attribute."""

    name: str
    module: nn.Module
    kind: SiteKind
    mixin: type[Mixin]
    state: Any


@dataclass(frozen=True)
class Dropped:
    """A module that looked like a candidate, and the reason why it keeps its own forward."""

    name: str
    kind: SiteKind
    reason: str
