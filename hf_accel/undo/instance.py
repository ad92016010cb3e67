"""A class for one object, which patch() gives to an instance instead of changing its class."""

from __future__ import annotations

from typing import Any


class Mixin:
    """Base of the mixins that come before an object's own class."""

    original_class: type  # what the object's class was

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the original class, since the mixed one cannot be found by its name."""
        reduced = super().__reduce_ex__(protocol)
        assert isinstance(reduced, tuple)
        return (rebuild, type(self).__bases__, *reduced[2:])


def original_class(given: object) -> Any:
    """Return the class that an object had before a mixin was put before it."""
    return getattr(type(given), "original_class", type(given))


_MIXED: dict[tuple[type, type], type] = {}


def mixed_class(mixin: type[Mixin], original: type) -> type:
    """Make the subclass of (mixin, original). It has the original's name, since transformers compares names."""
    if (mixin, original) not in _MIXED:
        names: dict[str, Any] = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        _MIXED[mixin, original] = type(original.__name__, (mixin, original), names | {"original_class": original})
    return _MIXED[mixin, original]


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
        return type(each)(each.__name__, tuple(map(without, each.__bases__)), own)

    return without(kind) if any(map(is_ours, kind.__mro__)) else original


def rebuild(mixin: type[Mixin], original: type) -> Any:
    return object.__new__(mixed_class(mixin, original))
