"""Every write to a model goes through a Journal, which can take it back.

A write is recorded as (owner, container, key, had it, old value), where the container is the name of
a dict in vars(owner), such as "_modules", or None for vars(owner) itself. Names instead of the dicts
themselves let a journal be deep-copied and pickled together with the model it belongs to.

A class that patch() gives to an instance is made from a Mixin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from ..errors import HfAccelError
from .running_code import RunningCode, running_code


@dataclass
class Write:
    """One entry of a dict that was set to `new`, and the old value, if there was one."""

    owner: Any
    container: str | None
    key: Any
    had_it: bool
    old: Any
    new: Any

    def mapping(self) -> MutableMapping[Any, Any]:
        entries: dict[Any, Any] = vars(self.owner)
        container: MutableMapping[Any, Any] = entries if self.container is None else entries[self.container]
        return container

    def __getstate__(self) -> dict[str, Any]:
        """Pickle a class with mixins by its parts, since it cannot be found by its name."""
        return vars(self) | ({"old": classes_of(self.old)} if self.key == "__class__" else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | ({"old": mixed_from(*state["old"])} if state["key"] == "__class__" else {}))


OWN_CLASS = "__class__"  # the name by which a method's super() finds the class in whose body it stands

Holders = dict[int, list[tuple[nn.Module, str]]]


class Journal:
    """Writes to objects, in order, that `undo` takes back exactly."""

    def __init__(self) -> None:
        self.writes: list[Write] = []

    @classmethod
    def of(cls, writes: Iterable[Write]) -> Journal:
        """Make a journal of some of the writes of another."""
        journal = cls()
        journal.writes = list(writes)
        return journal

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set owner.name = value in the instance's own dict; `__class__` is allowed."""
        if name == "__class__":
            # The new class is not recorded: it is made for this model alone, and pickle would not find it by name.
            self.writes.append(Write(owner, None, name, True, type(owner), None))
            owner.__class__ = value
        else:
            self.item(owner, None, name, value)

    def item(self, owner: Any, container: str | None, key: Any, value: Any) -> None:
        """Set owner.container[key] = value, for example ("_modules", "q_proj", new_linear); None is vars(owner)
        itself.
        """
        entries = vars(owner) if container is None else vars(owner)[container]
        self.writes.append(Write(owner, container, key, key in entries, entries.get(key), value))
        entries[key] = value

    def check(self, root: nn.Module | None = None) -> None:
        """Raise HfAccelError if a module of ours was replaced since, so that `undo` could not be exact."""
        holders = self._holders(root)
        for write in self.writes:
            self._place(write, holders)

    def undo(self, root: nn.Module | None = None) -> None:
        """Take back all writes, last first.

        root: the model, where modules of ours may have moved: into a LoRA layer that wraps them, which gets the
        original back inside, or out of one that was merged. With None they are undone where they were written. An
        interrupt is raised after all is undone.
        """
        holders = self._holders(root)
        interrupt: KeyboardInterrupt | None = None
        done = False
        while not done:
            try:
                while self.writes:
                    self._take_back(self.writes[-1], holders)
                    self.writes.pop()  # after, so that nothing is forgotten; to take a write back twice does no harm
                done = True
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _holders(self, root: nn.Module | None) -> Holders:
        """id of a module -> the modules that hold it now, and by which names. The last ones are those that modules of
        ours have replaced, which come back.
        """
        owners = [write.owner for write in self.writes if write.container == "_modules"]
        replaced = [write.old for write in self.writes if isinstance(write.old, nn.Module)]
        holders: Holders = {}
        for parent in {m: None for top in (*(owners if root is None else [root]), *replaced) for m in top.modules()}:
            for name, child in parent._modules.items():
                holders.setdefault(id(child), []).append((parent, name))
        return holders

    def _take_back(self, write: Write, holders: Holders) -> None:
        if write.key == "__class__" and write.container is None:
            write.owner.__class__ = unmixed_class(type(write.owner), write.old)
            return
        entries, key = self._place(write, holders)
        if write.had_it:
            entries[key] = write.old
        else:
            entries.pop(key, None)

    @staticmethod
    def _place(write: Write, holders: Holders) -> tuple[MutableMapping[Any, Any], Any]:
        """Return the dict and key that hold the written value now."""
        entries = write.mapping()
        if write.container != "_modules":
            return entries, write.key
        places = holders.get(id(write.new), [])
        current = entries.get(write.key)
        if (write.owner, write.key) in places or (not places and current is write.old):  # taken back already
            return entries, write.key
        if places:
            parent, name = places[0]
            return parent._modules, name
        raise HfAccelError(
            f"cannot undo: module {write.key!r} of {type(write.owner).__name__} was replaced by "
            f"{type(current).__name__} after patch(); put hf_accel's module back, or reload the model"
        )


class Mixin:
    """Base of the mixins that come before an object's own class, or before that with another mixin."""

    original_class: type  # what the object's class was
    asks_itself = False  # whether its forward finds out by itself whether its class runs other code than it computes

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the original class, since the mixed one cannot be found by its name."""
        reduced = super().__reduce_ex__(protocol)
        assert isinstance(reduced, tuple)
        return (rebuild, classes_of(type(self)), *reduced[2:])


def original_class(given: object) -> Any:
    """Return the class that an object had before mixins were put before it."""
    return _innermost(type(given))


_MIXED: dict[tuple[type, type, RunningCode], type] = {}


def mixed_class(mixin: type[Mixin], original: type) -> type:
    """Make the subclass of (mixin, original). It has the original's name, since transformers compares names."""
    code = running_code(_innermost(original))
    if (mixin, original, code) not in _MIXED:
        names: dict[str, Any] = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        names |= {name: _while_mixed(mixin, name, original) for name in _overridden(mixin, original)}
        _MIXED[mixin, original, code] = type(
            original.__name__, (mixin, original), names | {"original_class": original}
        )
    return _MIXED[mixin, original, code]


def _innermost(kind: Any) -> Any:
    """Return the class before all mixins."""
    while hasattr(kind, "original_class"):
        kind = kind.original_class
    return kind


def _overridden(mixin: type[Mixin], original: type) -> list[str]:
    """Return the names of the original's methods that a mixin has its own of."""
    own = {name: value for base in reversed(mixin.__mro__) if base is not object for name, value in vars(base).items()}
    functions = [name for name, value in own.items() if isinstance(value, FunctionType) and not name.startswith("__")]
    return [name for name in functions if hasattr(original, name)]


def _while_mixed(mixin: type[Mixin], name: str, original: type) -> Callable[..., Any]:
    """Return a mixin's method, which becomes that of the object's own class once the mixin is taken away: hooks of
    accelerate, a Trainer or the user's own code may have kept it. A forward does so also while the class runs other
    code than ours computes.
    """
    ours: Any = getattr(mixin, name)
    known, is_checked = running_code(_innermost(original)), name == "forward" and not mixin.asks_itself

    @functools.wraps(ours)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, mixin):
            if is_checked and not is_compiling() and not known.hold():
                return getattr(original, name)(self, *args, **kwargs)
            return ours(self, *args, **kwargs)
        return getattr(original, name)(self, *args, **kwargs)  # a class derived since may call this one in its own

    return method


def unmixed_class(kind: type, original: type) -> type:
    """Return the class of an object without the mixin: `kind` is its class now, `original` the one before mixing.

    Others may have derived a class for the object from the mixed one, as parametrizations and FSDP do: that class is
    then made again.
    """

    def is_ours(each: type) -> bool:
        return vars(each).get("original_class") is original

    def without(each: type) -> type:
        if is_ours(each):
            return original
        if not any(map(is_ours, each.__mro__)):
            return each
        own = {name: value for name, value in vars(each).items() if name not in ("__dict__", "__weakref__")}
        cell = CellType()
        own = {name: _in_class(value, cell) for name, value in own.items()}
        cell.cell_contents = made = type(each)(each.__name__, tuple(map(without, each.__bases__)), own)
        return made

    return without(kind) if any(map(is_ours, kind.__mro__)) else original


def _in_class(value: Any, cell: CellType) -> Any:
    """Return what stands in the body of a class, for another class, which `cell` will hold: super() asks for it."""
    if isinstance(value, staticmethod | classmethod):
        return type(value)(_in_class(value.__func__, cell))
    if isinstance(value, property):
        read, write, delete = (_in_class(each, cell) for each in (value.fget, value.fset, value.fdel))
        return property(read, write, delete, value.__doc__)
    if not isinstance(value, FunctionType) or OWN_CLASS not in value.__code__.co_freevars:
        return value
    closure = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    cells = tuple(cell if name == OWN_CLASS else held for name, held in closure)
    made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__, made.__doc__, made.__qualname__ = value.__kwdefaults__, value.__doc__, value.__qualname__
    made.__annotations__ = value.__annotations__
    vars(made).update(vars(value))
    return made


def rebuild(*classes: type) -> Any:
    return object.__new__(mixed_from(*classes))


def classes_of(kind: type) -> tuple[type, ...]:
    """Return the mixins of a class that was made here, in order, and the class that comes after them."""
    mixins: list[type] = []
    while isinstance(vars(kind).get("original_class"), type):
        mixin, kind = kind.__bases__
        mixins.append(mixin)
    return (*mixins, kind)


def mixed_from(*classes: Any) -> Any:
    """Make the class of these classes, as `classes_of` gives them."""
    *mixins, kind = classes
    for mixin in reversed(mixins):
        kind = mixed_class(mixin, kind)
    return kind
