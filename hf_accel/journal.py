"""Every write to a model goes through a Journal, which plays it back.

A write is recorded as (owner, container, key, had it, old value), where the container is the name of
a dict in vars(owner), such as "_modules", or None for vars(owner) itself. Names instead of the dicts
themselves let a journal be deep-copied and pickled together with the model it belongs to.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .errors import HfAccelError


@dataclass
class Write:
    """One entry of a dict that was set to `new`, and what stood there, if it had it."""

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


class Journal:
    """Writes to objects, in order, that `undo` takes back exactly."""

    def __init__(self) -> None:
        self.writes: list[Write] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """owner.name = value, in the instance's own dict; `__class__` is allowed."""
        if name == "__class__":
            # Without the new class, which is made for this model alone, so that pickle would not find it by name.
            self.writes.append(Write(owner, None, name, True, type(owner), None))
            owner.__class__ = value
        else:
            self._write(owner, None, name, value)

    def item(self, owner: Any, container: str, key: Any, value: Any) -> None:
        """owner.container[key] = value, for example ("_modules", "q_proj", new_linear)."""
        self._write(owner, container, key, value)

    def _write(self, owner: Any, container: str | None, key: Any, value: Any) -> None:
        entries = vars(owner) if container is None else vars(owner)[container]
        self.writes.append(Write(owner, container, key, key in entries, entries.get(key), value))
        entries[key] = value

    def check(self) -> None:
        """Raise HfAccelError if a module of ours was replaced since, so that `undo` could not be exact."""
        for write in self.writes:
            self._place(write)

    def undo(self) -> None:
        """Take back all writes, last first.

        Something else that has wrapped a module of ours since (a LoRA layer, say) stays, and gets the
        original back inside.
        """
        while self.writes:
            write = self.writes.pop()
            if write.key == "__class__" and write.container is None:
                write.owner.__class__ = write.old
                continue
            entries, key = self._place(write)
            if write.had_it:
                entries[key] = write.old
            else:
                entries.pop(key, None)

    @staticmethod
    def _place(write: Write) -> tuple[MutableMapping[Any, Any], Any]:
        """The dict and key that hold what was written, now."""
        entries = write.mapping()
        current = entries.get(write.key)
        if write.container != "_modules" or current is write.new:
            return entries, write.key
        for parent in current.modules() if isinstance(current, nn.Module) else ():
            for name, child in parent._modules.items():
                if child is write.new:
                    return parent._modules, name
        raise HfAccelError(
            f"cannot undo: module {write.key!r} of {type(write.owner).__name__} was replaced by "
            f"{type(current).__name__} after patch(); put hf_accel's module back, or reload the model"
        )
