"""Finds which code runs when a module is called, and whether that is the code that its package wrote.

Others may replace it at any time: a method of a class, a function that a file of transformers calls by its name, or
one of torch's functions. What computes the same in another way may be used only while nobody has.
"""

from __future__ import annotations

import dis
import functools
import linecache
import re
import sys
from collections.abc import Callable, Iterable
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

OURS = "hf_accel"
# Packages whose functions depend on their arguments alone.
KNOWN_PACKAGES = frozenset({OURS, "torch", "transformers", "accelerate", "peft", "liger_kernel"})
CALLED = ("forward", "__call__", "__getattr__")  # what runs when a module is called
BY_TORCH = ("__call__", "_call_impl", "_wrapped_call_impl")  # of its Module
IMPORTS = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)


class Lookup(NamedTuple):
    """A name that code looks up, in the globals of a file or of a class and its bases, and what it finds."""

    owner: dict[str, Any] | type
    name: str
    value: Any


class Lookups:
    """Lookups that must go on finding the same objects."""

    def __init__(self, lookups: Iterable[Lookup]) -> None:
        once = {(id(lookup.owner), lookup.name): lookup for lookup in lookups}.values()
        # As columns, so that no loop of Python's compares them: this is asked in each step.
        self._of_dicts = _columns(lookup for lookup in once if isinstance(lookup.owner, dict))
        self._of_classes = _columns(lookup for lookup in once if isinstance(lookup.owner, type))

    def hold(self) -> bool:
        owners, names, values = self._of_dicts
        kinds, attributes, methods = self._of_classes
        try:
            return all(map(is_, map(dict.get, owners, names), values)) and all(
                map(is_, map(getattr, kinds, attributes), methods)
            )
        except AttributeError:  # a method was taken away
            return False


def _columns(lookups: Iterable[Lookup]) -> tuple[list[Any], list[str], list[Any]]:
    rows = list(lookups)
    return [row.owner for row in rows], [row.name for row in rows], [row.value for row in rows]


class RunningCode:
    """The code that runs when a class or a function is called, as it was when this was made.

    It is found by names: of methods of the class, of functions of its file and what these call in turn, and of
    functions of torch. Our own code, which a class that patch() made has, is left out. lookups: of those. others:
    where others have put code of their own instead of a known package's; None if nowhere.
    """

    def __init__(self, called: Any) -> None:
        self._found: dict[tuple[int, str], Lookup] = {}
        self._read: set[Any] = set()
        self.others: str | None = None
        if isinstance(called, type):
            for name in (name for name in CALLED if hasattr(called, name)):
                self._method(called, name)
            for name in BY_TORCH:
                self._note(nn.Module, name, getattr(nn.Module, name), is_known=True)
        else:
            self._function(called, None)
        self.lookups = tuple(self._found.values())
        self.hold = Lookups(self.lookups).hold

    def _method(self, kind: type, name: str) -> None:
        """Note what the class finds by a name, and what its bases do, whose methods may be called by super()."""
        for base in (kind, *(base for base in kind.__mro__[1:] if name in vars(base) and base is not nn.Module)):
            package = package_of(next(each for each in base.__mro__ if name in vars(each)))
            if package == OURS or (id(base), name) in self._found:
                continue
            value = getattr(base, name)
            if isinstance(value, MethodType):  # made when it is asked for
                continue
            self._note(base, name, value, is_known=package in KNOWN_PACKAGES)
            self._function(function_of(value), kind)

    def _function(self, called: Any, kind: type | None) -> None:
        for function in decorated(called):
            if function in self._read:
                continue
            self._read.add(function)
            for names in looked_up(function.__code__):
                if kind is not None and names[0] == "":
                    self._of_class(kind, names[1])
                else:
                    self._global(function, names)

    def _of_class(self, kind: type, name: str) -> None:
        """Note a method that code may call on itself. Those of torch's Module have nothing to do with numbers."""
        owner = next((base for base in kind.__mro__ if name in vars(base)), nn.Module)
        if owner is not nn.Module and isinstance(vars(owner)[name], FunctionType | staticmethod | property):
            self._method(kind, name)

    def _global(self, function: FunctionType, names: tuple[str, ...]) -> None:
        owner: Any = function.__globals__
        for name in names:
            value = owner.get(name)
            if not isinstance(value, ModuleType):
                break
            owner = vars(value)
        else:
            return
        if not isinstance(value, type) and callable(value):
            self._note(owner, name, value, is_known=is_known_code(function))
            for each in decorated(value):
                if each.__globals__ is function.__globals__:
                    self._function(each, None)

    def _note(self, owner: Any, name: str, value: Any, *, is_known: bool) -> None:
        """is_known: whether a known package wrote the code that looks the name up."""
        self._found[id(owner), name] = Lookup(owner, name, value)
        function = function_of(value)
        if not is_known or not isinstance(function, FunctionType) or is_known_code(function):
            return
        is_class = isinstance(owner, type)
        file = getattr(sys.modules.get(owner.__module__), "__file__", None) if is_class else owner.get("__file__")
        place = owner.__qualname__ if is_class else str(owner.get("__name__"))
        own = place.partition(".")[0], *imported_by(str(file))
        if package_of(function) not in own:
            self.others = self.others or f"{place}.{name}"


def decorated(called: Any) -> list[FunctionType]:
    """Return a function and those that its decorators have put others around."""
    found = [called] if isinstance(called, FunctionType) else []
    for function in found:  # more are found meanwhile
        for cell in function.__closure__ or ():
            try:
                inner = cell.cell_contents
            except ValueError:  # it holds nothing yet
                continue
            if isinstance(inner, FunctionType) and inner not in found:
                found.append(inner)
    return found


@functools.lru_cache(maxsize=4096)
def looked_up(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the names by which code finds others: a global one and its attributes, or "" and that of an attribute."""
    found: dict[tuple[str, ...], None] = {}
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            chain = (step.argval,)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            found["", step.argval] = None
            chain = (*chain, step.argval) if chain else ()
        elif step.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG"):
            chain = ()
        if chain:
            found.pop(chain[:-1], None)
            found[chain] = None
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return tuple(dict.fromkeys([*found, *(names for each in inner for names in looked_up(each))]))


@functools.lru_cache(maxsize=1024)
def imported_by(file: str) -> frozenset[str]:
    """Return the packages that a file imports from, whose functions it may call though nobody has replaced one."""
    return frozenset(IMPORTS.findall("".join(linecache.getlines(file))))


def function_of(called: Any) -> Any:
    """Return the function that runs when something is called."""
    while isinstance(called, functools.partial):
        called = called.func
    if isinstance(called, property):
        called = called.fget
    called = getattr(called, "__func__", called)
    has_code = hasattr(called, "__globals__") or isinstance(called, BuiltinFunctionType | type)
    return called if has_code else type(called).__call__


def is_known_code(function: Any) -> bool:
    """Return whether a function of Python was defined in a known package."""
    # functools.wraps copies __module__, and not this.
    package = getattr(function, "__globals__", {}).get("__name__")
    return str(package).partition(".")[0] in KNOWN_PACKAGES


def package_of(defined: Any) -> str:
    """Return the package of a class or a function; this one of a class that patch() made."""
    if isinstance(defined, type):
        return OURS if is_mixed(defined) else defined.__module__.partition(".")[0]
    return str(getattr(defined, "__globals__", {}).get("__name__")).partition(".")[0]


def is_mixed(kind: type) -> bool:
    """Return whether patch() made a class, which says that it is of the module of the class before it."""
    return "original_class" in vars(kind)


def is_replaced_method(kind: type, name: str) -> bool:
    """Return whether others have replaced a method that a class of a known package has, or gets from one."""
    holder = next((base for base in kind.__mro__ if name in vars(base)), None)
    if holder is None or package_of(holder) not in KNOWN_PACKAGES:
        return False
    return not is_known_code(function_of(vars(holder)[name]))


_SEEN: dict[Any, RunningCode] = {}


def running_code(called: type | Callable[..., Any]) -> RunningCode:
    """Return the code that runs now when modules of a class, or a function, are called."""
    called = called if isinstance(called, type) else function_of(called)
    known = _SEEN.get(called)
    if known is None or not known.hold():
        known = _SEEN[called] = RunningCode(called)
    return known
