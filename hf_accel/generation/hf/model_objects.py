"""The objects that a model is made of: where they are the same ones, nothing that they hold is read again."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, compress
from operator import attrgetter, is_
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...kernels import cpu
from ...kernels.cpu.row_kernels import SampleTable
from ...linear import QuantModule
from ...recognition.unchanged import GLOBAL_HOOKS, HOOKS
from ...tensors import PLAIN
from ...undo.running_code import is_known_code

SCALARS = (bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, type)
FUNCTIONS = (FunctionType, MethodType, partial)
CONTAINERS = (dict, list, tuple, set, frozenset)
PLAIN_KINDS = frozenset(PLAIN)
SAMPLES = 256  # numbers of each tensor
JOINED = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64)  # by torch
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


class ModelObjects:
    """Sees that a model consists of the objects of which it consisted, with the same numbers: a few loops of C.

    It knows modules, configs, plain values, functions of known packages, and objects of which the identity counts.
    It never says of a model with anything else that it is the same. No module, tensor or such object is kept alive;
    dictionaries of modules are, until one of the modules is gone. has_held: whether it has seen the same model again.
    """

    def __init__(self, model: nn.Module) -> None:
        found = _Objects(model)
        self._found = holder = [found] if found.are_known else []
        self._references = [weakref.ref(module, lambda _: holder.clear()) for module in found.modules]
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
        self.modules: list[nn.Module] = []  # until there are references to them
        self._type = type(model)
        self._dicts: list[dict[Any, Any]] = []  # that have entries; the model's own first
        self._values: list[Any] = []  # of all of these in order, None for what is not held
        self._objects: dict[int, Any] = {}  # references to others, by their places
        self._tensors: list[int] = []  # the places of tensors
        self._children: list[int] = []  # the places of modules and configs, with their types and dictionaries
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
        # Another object that is called may read what it holds.
        self.are_known &= all(isinstance(hook, FUNCTIONS) and self._is_plain_code(hook) for hook in hooks)
        if isinstance(module, QuantModule):
            self._packed.append((own, reader_of_packed(own["_packed"])))

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
        elif isinstance(value, nn.Module | PreTrainedConfig):
            self._children.append(place)
            self._types.append(type(value))
            self._inside.append(vars(value))
            if isinstance(value, nn.Module):
                self.are_known &= is_owned
                self._module(value)
            else:
                self._container(vars(value))
        else:
            if isinstance(value, FUNCTIONS):
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


# -- tensors -----------------------------------------------------------------------------------------------


def facts_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return what plain tensors are without their numbers, and how often torch knows of a write to them."""
    return [(t.dtype, t.shape, t.stride(), t.device, t.data_ptr(), version_of(t)) for t in tensors]


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Samples:
    """Numbers of plain tensors as they were when this was made. It keeps no tensor alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        is_native, on_host = cpu.refusal() is None, []
        # Of tensors that torch must read, as those on a GPU: their places, and the sizes and strides of `spread`.
        self._elsewhere: dict[Any, list[tuple[int, Any, Any]]] = {}
        with torch.no_grad():
            for place, tensor in enumerate(tensors):
                if not _is_read(tensor) or not tensor.data_ptr():
                    continue
                view = spread(tensor)
                if is_native and tensor.is_cpu:
                    on_host.append(view)
                else:
                    of_kind = self._elsewhere.setdefault((tensor.device, tensor.dtype), [])
                    of_kind.append((place, view.shape, view.stride()))
        self._table = SampleTable(on_host)
        self._bytes, self._numbers = self._table.read(), self._read_elsewhere(tensors)

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the same tensors, which are where they were, have the same numbers."""
        return self._table.read() == self._bytes and are_equal(self._read_elsewhere(tensors), self._numbers)

    @torch.no_grad()
    def _read_elsewhere(self, tensors: Sequence[Tensor]) -> dict[Any, Tensor]:
        found = {}
        for kind, places in self._elsewhere.items():
            parts = [_numbers(tensors[place]).as_strided(size, stride) for place, size, stride in places]
            found[kind] = _bits(torch.cat(parts if kind[1] in JOINED else [_bits(part) for part in parts]))
        return found


@torch.no_grad()
def samples(tensors: Iterable[Tensor]) -> dict[Any, Tensor]:
    """Return the bits of numbers that are spread over each tensor, by device and dtype [numbers of all tensors]."""
    found: dict[Any, list[Tensor]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in filter(_is_read, tensors):
            sample = spread(tensor)
            found.setdefault((sample.device, sample.dtype), []).append(sample)
        return {key: torch.cat(parts) for key, parts in found.items()}


def are_equal(numbers: dict[Any, Tensor], others: dict[Any, Tensor]) -> bool:
    """Return whether two results of `samples` are the same."""
    return numbers.keys() == others.keys() and all(torch.equal(each, others[key]) for key, each in numbers.items())


def _is_read(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and not tensor.is_quantized


def spread(tensor: Tensor) -> Tensor:
    """Return up to SAMPLES numbers of a tensor, from its first to its last, as integers [n]: a view."""
    tensor = _numbers(tensor)
    length = tensor.numel() if tensor.is_contiguous() else _reach(tensor)
    # An odd step, because rows have even lengths: numbers of one column alone would say little.
    step = max(1, length // SAMPLES - 1) | 1
    count = min(SAMPLES, 1 + (length - 1) // step)
    return _bits(tensor.as_strided((count,), (step,)))


def _numbers(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGER_DTYPES[tensor.dtype.itemsize])


def _reach(tensor: Tensor) -> int:
    """Return how far the last number of a tensor is from its first in memory, and one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# -- quantized weights -------------------------------------------------------------------------------------


def watched_tensors(packed: Any) -> Iterator[Tensor]:
    """Return the tensors that a packed weight is made of, without those that it keeps of its last call."""
    if isinstance(packed, Tensor):
        yield packed
    elif isinstance(packed, list):
        for part in packed[:: max(1, len(packed) - 1)]:  # the first and the last of many experts
            yield from watched_tensors(part)
    else:
        kind: Any = type(packed)
        for name in stored_fields(kind):
            yield from watched_tensors(getattr(packed, name))


def reader_of_packed(packed: Any) -> Callable[[Any], Iterable[Any]]:
    """Return what gives the tensors of a packed weight, and what stands in places where another one may have tensors;
    cheap where it has no list. It raises AttributeError for a weight of another form.
    """
    names = list(_leaves(packed))
    known = [name for name in names if name is not None]
    return attrgetter(*known) if len(names) > 1 and known == names else watched_tensors


def _leaves(packed: Any, name: str = "") -> Iterator[str | None]:
    """Return the names of the tensors and plain values in a packed weight, with dots; None for a list."""
    kind: Any = type(packed)
    fields = stored_fields(kind)
    if not fields:
        yield None if isinstance(packed, list) else name
    for each in fields:
        yield from _leaves(getattr(packed, each), f"{name}.{each}" if name else each)


@lru_cache(maxsize=4096)
def stored_fields(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass that say what it is, without what it keeps of its last call."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return tuple(field.name for field in fields if field.compare)
