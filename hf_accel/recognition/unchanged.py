"""Checks for changes and watchers of a module: all that torch, transformers and users put around a forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

# The dictionaries in which torch keeps hooks that a forward calls: of each module, and of all modules.
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (_global_forward_hooks, _global_forward_pre_hooks)
# All hooks of a module, with the notes on how they are called.
ALL_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
# Packages whose functions depend on their arguments alone.
KNOWN_PACKAGES = frozenset({"hf_accel", "torch", "transformers", "accelerate", "peft"})


def has_own_forward(module: nn.Module) -> bool:
    """Return whether the forward was replaced on the module itself: by accelerate, a compiler, or by hand."""
    return "forward" in module.__dict__


def is_unobserved(module: nn.Module) -> bool:
    """Return whether nobody would notice if a module was not called: it has no hooks, and the forward of its class."""
    own = module.__dict__
    hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or _global_forward_hooks or _global_forward_pre_hooks
    return not hooked and "forward" not in own


def is_known_code(function: Any) -> bool:
    """Return whether a function of Python was defined in a known package."""
    # functools.wraps copies __module__, and not this.
    package = getattr(function, "__globals__", {}).get("__name__")
    return str(package).partition(".")[0] in KNOWN_PACKAGES


class Read(NamedTuple):
    """A value that something depends on: `owner[name]` when it was read, None if it was missing."""

    owner: Mapping[str, Any]
    name: str
    value: Any


class Reads:
    """Entries of dictionaries that must stay the same objects."""

    def __init__(self, reads: Iterable[Read]) -> None:
        once = {(id(read.owner), read.name, id(read.value)): read for read in reads}.values()
        self._owners, self._names = [read.owner for read in once], [read.name for read in once]
        self._values = [read.value for read in once]

    def hold(self) -> bool:
        # No loop of Python's: this is asked about each layer, or the whole model, in each step.
        return all(map(is_, map(dict.get, self._owners, self._names), self._values))  # type: ignore[arg-type]
