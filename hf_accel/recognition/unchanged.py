"""Checks for changes and watchers of a module: all that torch, transformers and users put around a forward."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ..undo.running_code import (
    KNOWN_PACKAGES,
    Lookups,
    function_of,
    is_known_code,
    is_mixed,
    package_of,
    running_code,
)

# The dictionaries in which torch keeps hooks that a forward calls: of each module, and of all modules.
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (_global_forward_hooks, _global_forward_pre_hooks)
# All hooks of a module, with the notes on how they are called.
ALL_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
PLAIN_TYPES = (bool, int, float, str, torch.dtype, type(None))  # of values that are compared by themselves
PYTHONS = frozenset({"builtins", "abc", "typing"})  # of which classes of those packages are made
# Packages whose modules are linear layers of other quantizers, which compute each token by itself.
QUANTIZERS = frozenset({"bitsandbytes", "compressed_tensors", "gptqmodel", "optimum", "torchao"})
# What a class may say of its own without changing what its modules compute.
HARMLESS = frozenset(
    {"__init__", "__repr__", "extra_repr", "_init_weights", "post_init", "from_pretrained", "save_pretrained"}
)


def has_own_forward(module: nn.Module) -> bool:
    """Return whether the forward was replaced on the module itself, by accelerate, a compiler, or by hand; or whether
    others have replaced something that the forward of its class is made of.
    """
    return "forward" in module.__dict__ or is_replaced(type(module))


def is_replaced(kind: type) -> bool:
    """Return whether others have replaced a method of a known package's class, or a function that it calls."""
    return running_code(kind).others is not None


def replaced_in(modules: Iterable[nn.Module]) -> str | None:
    """Return what others have replaced of the classes of some modules, as a clause; None if nothing."""
    places = (running_code(type(each)).others for each in modules)
    return next((f"others have replaced {place}" for place in places if place is not None), None)


def is_unobserved(module: nn.Module) -> bool:
    """Return whether nobody would notice if a module was not called: it has no hooks, and the forward of its class."""
    own = module.__dict__
    hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or _global_forward_hooks or _global_forward_pre_hooks
    return not hooked and "forward" not in own


def others_code(modules: Iterable[nn.Module]) -> str | None:
    """Return where a hook, a replaced forward or a class of others runs, as words; None where none of these does."""
    if any(not is_known_code(function_of(hook)) for hooks in GLOBAL_HOOKS for hook in hooks.values()):
        return "a hook on all modules"
    kinds: set[type] = set()
    for module in modules:
        own = module.__dict__
        kinds.add(type(module))
        hooked = own["_forward_hooks"] or own["_forward_pre_hooks"]  # few modules are, and each call asks of all
        if hooked and any(not is_known_code(function_of(hook)) for name in HOOKS for hook in own[name].values()):
            return f"a hook on a {type(module).__name__}"
        if "forward" in own and not is_known_code(function_of(own["forward"])):
            return f"a forward that was set on a {type(module).__name__}"
    replaced = next((others for kind in kinds if (others := running_code(kind).others) is not None), None)
    if replaced is not None:
        return f"{replaced}, which was replaced"
    return next((f"the class {kind.__name__}" for kind in kinds if is_written_by_others(kind)), None)


def is_others_class(kind: type) -> bool:
    """Return whether others wrote, or replaced, what a class computes."""
    return is_replaced(kind) or is_written_by_others(kind)


@functools.lru_cache(maxsize=1024)
def of_others(bases: tuple[type, ...]) -> tuple[type, ...]:
    """Return those of a class and its bases that none of the known packages wrote."""
    return tuple(base for base in bases if package_of(base) not in KNOWN_PACKAGES | PYTHONS | QUANTIZERS)


def is_written_by_others(kind: type) -> bool:
    """Return whether others wrote what a class computes. Such a class may still have a name of its own, and say how a
    model is made or saved.
    """
    others = of_others(kind.__mro__)
    if not others:
        return False
    if any("forward" in vars(base) for base in others):
        return True
    known = [base for base in kind.__mro__ if base not in others]
    return any(
        hasattr(type(value), "__get__") or (callable(value) and not isinstance(value, type))
        for base in others
        for name, value in vars(base).items()
        if name not in HARMLESS and any(name in vars(each) for each in known)
    )


def is_derived(kind: type) -> bool:
    """Return whether others derived a class from one that patch() made, so that code of theirs is around ours."""
    return hasattr(kind, "original_class") and not is_mixed(kind)


class Read(NamedTuple):
    """A value that something depends on: `owner[name]` when it was read, None if it was missing.

    Of an owner that is a module, the value is its class.
    """

    owner: Mapping[str, Any] | nn.Module
    name: str
    value: Any


class Reads:
    """Entries of dictionaries that must stay the same objects, and modules that must stay of the same classes, whose
    code must stay the same, too.
    """

    def __init__(self, reads: Iterable[Read]) -> None:
        once = {(id(read.owner), read.name, id(read.value)): read for read in reads}.values()
        entries = [read for read in once if not isinstance(read.owner, nn.Module)]
        self._owners, self._names = [read.owner for read in entries], [read.name for read in entries]
        self._values = [read.value for read in entries]
        self._seen = [read.owner for read in once if isinstance(read.owner, nn.Module)]
        self._kinds: list[type] = [read.value for read in once if isinstance(read.owner, nn.Module)]
        kinds = dict.fromkeys(self._kinds)
        self._code = Lookups(each for kind in kinds for each in running_code(kind).lookups)

    def hold(self) -> bool:
        # No loop of Python's: this is asked about each layer, or the whole model, in each step.
        same = all(map(is_, map(dict.get, self._owners, self._names), self._values))  # type: ignore[arg-type]
        return same and list(map(type, self._seen)) == self._kinds and self._code.hold()


class Hooks:
    """The hooks that forwards of some modules call. own: one that does not count."""

    def __init__(self, modules: Iterable[nn.Module], own: object = None) -> None:
        hooks = [*GLOBAL_HOOKS, *(module.__dict__[name] for module in modules for name in HOOKS)]
        counts = [(each, sum(hook is own for hook in each.values())) for each in hooks]
        self._without = [each for each, number in counts if not number]
        self._with_own = [(each, number) for each, number in counts if number]

    def any_others(self) -> bool:
        """Return whether somebody else wants to see one of the modules now. It costs little."""
        return any(self._without) or any(len(hooks) != number for hooks, number in self._with_own)


class Surroundings:
    """Modules that run around those that a trace knows, as they were when this was made.

    own_hook: a hook that changes nothing.
    """

    def __init__(self, modules: list[nn.Module], own_hook: object = None) -> None:
        self._seen: list[nn.Module] = modules
        self._types: list[Any] = list(map(type, modules))
        self._code = Lookups(each for kind in set(self._types) for each in running_code(kind).lookups)
        self._children = [module._modules for module in modules]
        self._lengths = list(map(len, self._children))
        self._reads = Reads(_around(modules))
        self._hooks = Hooks(modules, own_hook)
        self._is_known = all(map(is_known_class, set(self._types))) and not any(map(has_own_forward, modules))

    def hold(self) -> bool:
        """Return whether they are the same modules of the same classes, each with the same children."""
        return (
            self._reads.hold()
            and list(map(len, self._children)) == self._lengths
            and list(map(type, self._seen)) == self._types
            and self._code.hold()
        )

    def is_quiet(self) -> bool:
        """Return whether all their code is known, and no hook runs between it."""
        return self._is_known and not self._hooks.any_others()


def _around(modules: Iterable[nn.Module]) -> Iterator[Read]:
    for module in modules:
        own = module.__dict__
        yield from (Read(own, name, own.get(name)) for name in ("forward", "_modules", *HOOKS))
        yield from (Read(own["_modules"], name, child) for name, child in own["_modules"].items())


def is_known_class(kind: type) -> bool:
    """Return whether a module's class, its bases and their code are all of known packages or Python's own."""
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return packages <= KNOWN_PACKAGES | PYTHONS and not is_replaced(kind)


def is_same_value(value: object, traced: object) -> bool:
    """Return whether an argument is the plain value that it was."""
    return value is traced or (type(value) is type(traced) and isinstance(value, PLAIN_TYPES) and value == traced)
