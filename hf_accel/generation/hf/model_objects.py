"""The objects that a model is made of: where they are the same ones, nothing that they hold is read again."""

from __future__ import annotations

import weakref
from functools import partial
from itertools import chain, compress
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...linear import QuantModule
from ...recognition.unchanged import GLOBAL_HOOKS, HOOKS, is_known_code
from ...tensors import PLAIN
from .weight_samples import Samples, facts_of, reader_of

SCALARS = (bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, type)
FUNCTIONS = (FunctionType, MethodType, partial)
CONTAINERS = (dict, list, tuple, set, frozenset)
PLAIN_KINDS = frozenset(PLAIN)


class ModelObjects:
    """Sees that a model consists of the objects of which it consisted, with the same numbers: a few loops of C.

    It knows modules, configs, plain values, functions of known packages, and objects of which only the identity counts;
    of a model with anything else, it never says that it is the same. No module, tensor or such object is kept alive;
    dictionaries of modules are, until one of the modules is gone. has_held: whether it has seen the same model again.
    """

    def __init__(self, model: nn.Module) -> None:
        found = _Objects(model)
        self._found = holder = [found] if found.are_known else []
        self._modules = [weakref.ref(module, lambda _: holder.clear()) for module in found.modules]
        found.modules.clear()
        self.has_held = False

    def hold(self, model: nn.Module) -> bool:
        """Return whether the model is for sure the same. If it is not, it may be equal nevertheless."""
        holds = any(found.hold(model) for found in list(self._found))
        self.has_held |= holds
        return holds


class _Objects:
    def __init__(self, model: nn.Module) -> None:
        self.are_known = not any(GLOBAL_HOOKS)
        self.modules: list[nn.Module] = []
        self._type = type(model)
        self._dicts: list[dict[Any, Any]] = []  # that have entries; the model's own first
        self._values: list[Any] = []  # of all of these in order, None in the place of what is not held
        self._objects: dict[int, Any] = {}  # references to others, by their places
        self._tensors: list[int] = []  # the places of tensors
        self._children: list[int] = []  # the places of modules, with their types and dictionaries
        self._types: list[type] = []
        self._inside: list[dict[str, Any]] = []
        self._packed: list[tuple[dict[str, Any], Any]] = []  # dictionaries of quantized modules; what reads the weight
        self._rows: list[Any] = []  # lists and tuples
        self._sets: list[Any] = []
        self._empty: list[Any] = [*GLOBAL_HOOKS]
        self._methods_of: list[int] = []  # the dictionaries of modules of which there are methods
        self._met: set[int] = set()
        self._owned: set[int] = set()  # dictionaries that are gone with their module
        self._module(model)
        for entries in self._dicts:  # more are found meanwhile
            for value in entries.values():
                self._values.append(self._held(value, id(entries) in self._owned))
        self.are_known &= self._owned.issuperset(self._methods_of)
        self._keys, self._sizes = [*chain.from_iterable(self._dicts)], [*map(len, self._dicts)]
        self._members, self._row_sizes = [*chain.from_iterable(self._rows)], [*map(len, self._rows)]
        self._set_members = [*map(frozenset, self._sets)]
        if self.are_known:
            parts = self._parts()
            self._part_types, self._are_tensors = [*map(type, parts)], [isinstance(part, Tensor) for part in parts]
            tensors = self._tensors_of(self._now(), parts)
            self.are_known = all(type(t) in PLAIN and t.layout is torch.strided and not t.is_meta for t in tensors)
        if self.are_known:
            self._facts, self._samples = facts_of(tensors), Samples(tensors)

    def _module(self, module: nn.Module) -> None:
        own = vars(module)
        if id(own) in self._met:
            return
        self.modules.append(module)
        self._owned |= {id(own), *(id(own[name]) for name in ("_parameters", "_buffers", "_modules"))}
        self._container(own)
        hooks = (hook for name in HOOKS if own[name] for hook in own[name].values())
        self.are_known &= all(isinstance(hook, FUNCTIONS) and self._is_plain_code(hook) for hook in hooks)  # an object that is called reads what it holds
        if isinstance(module, QuantModule):
            self._packed.append((own, reader_of(own["_packed"])))

    def _held(self, value: Any, is_owned: bool) -> Any:
        """Note a value; return it if it is to be held."""
        if isinstance(value, SCALARS):
            return value
        if isinstance(value, CONTAINERS):
            self._container(value)
            return value
        place = len(self._values)
        if isinstance(value, Tensor):
            self.are_known &= is_owned
            self._tensors.append(place)
        elif isinstance(value, nn.Module):
            self.are_known &= is_owned
            self._children.append(place)
            self._types.append(type(value))
            self._inside.append(vars(value))
            self._module(value)
        else:
            if isinstance(value, PreTrainedConfig):
                self._container(vars(value))
            elif isinstance(value, FUNCTIONS):
                self.are_known &= self._is_plain_code(value)
            try:
                self._objects[place] = weakref.ref(value)
            except TypeError:
                return value
        return None

    def _container(self, value: Any) -> None:
        if id(value) in self._met:
            return
        self._met.add(id(value))
        if not value:
            self._empty.append(value)
        elif isinstance(value, dict):
            self._dicts.append(value)
        elif isinstance(value, list | tuple):
            self._rows.append(value)
            for each in value:
                self._member(each)
        else:
            self._sets.append(value)
            self.are_known &= all(isinstance(each, SCALARS) for each in value)

    def _member(self, value: Any) -> None:
        if isinstance(value, CONTAINERS):
            self._container(value)
        else:
            self.are_known &= isinstance(value, SCALARS)

    def _is_plain_code(self, code: Any) -> bool:
        """Return whether a function depends on its arguments alone, or on a module as well, which is noted."""
        if isinstance(code, partial):
            self._member(code.args)
            self._member(code.keywords)
            return isinstance(code.func, BuiltinFunctionType) or self._is_plain_code(code.func)
        if isinstance(code, MethodType) and isinstance(code.__self__, nn.Module):
            self._methods_of.append(id(vars(code.__self__)))
            code = code.__func__
        return isinstance(code, FunctionType) and is_known_code(code)

    # -- comparing -------------------------------------------------------------------------------------

    def hold(self, model: nn.Module) -> bool:
        if vars(model) is not self._dicts[0] or type(model) is not self._type or any(self._empty):
            return False
        if [*map(len, self._dicts)] != self._sizes or [*chain.from_iterable(self._dicts)] != self._keys:
            return False
        if [*map(len, self._rows)] != self._row_sizes or [*map(frozenset, self._sets)] != self._set_members:
            return False
        now, then = self._now(), self._values.copy()
        for place in chain(self._tensors, self._children):
            then[place] = now[place]
        for place, reference in self._objects.items():
            if (object_ := reference()) is None:
                return False
            then[place] = object_
        return (
            all(map(is_, now, then))
            and all(map(is_, chain.from_iterable(self._rows), self._members))
            and self._same_children([now[place] for place in self._children])
            and self._same_tensors(now)
        )

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._dicts))]

    def _parts(self) -> list[Any]:
        return [part for own, read in self._packed for part in read(own["_packed"])]

    def _tensors_of(self, values: list[Any], parts: list[Any]) -> list[Any]:
        return [*(values[place] for place in self._tensors), *compress(parts, self._are_tensors)]

    def _same_children(self, children: list[Any]) -> bool:
        return [*map(type, children)] == self._types and all(map(is_, map(vars, children), self._inside))

    def _same_tensors(self, values: list[Any]) -> bool:
        try:
            parts = self._parts()
            tensors = self._tensors_of(values, parts)
            return (
                [*map(type, parts)] == self._part_types
                and PLAIN_KINDS.issuperset(map(type, tensors))
                and facts_of(tensors) == self._facts
                and self._samples.hold(tensors)
            )
        except (AttributeError, RuntimeError):  # of a weight of another form, and of a tensor in another layout
            return False
