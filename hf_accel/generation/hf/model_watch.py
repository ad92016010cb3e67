"""A watch for changes of a model: of its plain values, its objects, and samples of its weights' numbers."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from functools import lru_cache, partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...errors import HfAccelError
from ...hardware.file_pages import MappedFiles
from ...linear import QuantModule
from ...recognition.unchanged import GLOBAL_HOOKS, HOOKS
from ...tensors import PLAIN, plain_tensors
from ...undo.running_code import is_known_code
from .model_objects import FUNCTIONS, SCALARS, ModelObjects, are_equal, samples, version_of, watched_tensors

PLAIN_KINDS, DICTS = frozenset(SCALARS), frozenset({dict, OrderedDict})
READ_OF_CODE = (bool, int, float, Tensor, nn.Module, *FUNCTIONS)


class ModelWatch:
    """Gives a model a salt, which changes as soon as the model is seen to have changed.

    declared: how often a program has said that the weights changed. files: those that the model's weights stay in, if
    there are any. A copy or a pickle of a watch has seen nothing, and its weights are in memory.
    """

    declared = 0
    files: MappedFiles | None = None
    reading: Reading | None = None  # the last one; it is another one whenever anything may have changed
    _objects: ModelObjects | None = None
    _compares_objects = True
    _salt: bytes

    def look(self, model: nn.Module) -> bytes:
        """Look at the whole model, and return its salt.

        Threads need not wait for each other: what they can do is to take another salt without need.
        """
        objects = self._objects
        if objects is None or not objects.hold(model):
            self._read(model)
        return self._salt

    def _read(self, model: nn.Module) -> None:
        last, before = self.reading, self._objects
        # Ahead of the reading, so that what is written in between is seen by the next look.
        objects = ModelObjects(model) if self._compares_objects else None
        reading = Reading(model)
        is_new = last is None or not last.equals(reading)
        if is_new:
            self.renew()
        # Some models are others after each use: to find their objects takes as long as two more readings.
        self._compares_objects = before.has_held if before is not None else not is_new
        self.reading, self._objects = reading, objects

    def renew(self) -> bytes:
        """Take another salt, whatever can be seen."""
        self._salt = os.urandom(16)
        return self._salt

    def check_files(self) -> None:
        """Raise HfAccelError if a file was written to that weights are read from."""
        path = None if self.files is None else self.files.written()
        if path is not None:
            raise HfAccelError(
                f"{path!r} was written to while a model runs from it, whose weights may have changed; load the model "
                "again. Replace such a file by a new one, as save_pretrained does, or set HF_ACCEL_MAP_WEIGHTS=0, so "
                "that weights are copied into memory"
            )

    def declare(self) -> None:
        """Note that the weights have changed."""
        self.renew()
        self.declared += 1

    def __reduce__(self) -> Any:
        return ModelWatch, ()


class Reading:
    """The content of a model at one time: its plain values, the identities of its objects, and numbers of its tensors.

    It keeps no weight alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._values: list[Any] = []
        self._objects: list[Any] = []  # those whose ids are among the values: weak where possible
        self._tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}  # of what was read already, by its id
        for hooks in GLOBAL_HOOKS:
            self._hooks(hooks)
        self._module(model)
        self._samples = samples(self._tensors)
        del self._tensors, self._numbers

    def equals(self, later: Reading) -> bool:
        if self._values != later._values:
            return False
        # Another object may have the address of one that is gone.
        if any(reference() is None for reference in self._objects):
            return False
        return are_equal(self._samples, later._samples)

    # -- reading ---------------------------------------------------------------------------------------

    def _all(self, values: Iterable[Any]) -> None:
        read = self._values
        for value in list(values):
            kind: Any = type(value)
            if kind in PLAIN_KINDS:  # most are, and this is asked of each module
                read.append(value)
            elif kind in DICTS and not value:
                read.append(kind)
            else:
                _reader(kind)(self, value)

    def _plain(self, value: Any) -> None:
        self._values.append(value)

    def _members(self, members: Set[Any]) -> None:
        self._values.append(frozenset(members))

    def _held(self, value: Any) -> None:
        """Read what an object holds; once, however often it is met."""
        number = self._numbers.setdefault(id(value), len(self._numbers))
        self._values.append(number)
        if number < len(self._numbers) - 1:
            return
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, (list, tuple)):
            self._values.append(len(value))
            self._all(value)
        else:
            self._entries(value if isinstance(value, dict) else vars(value))

    def _entries(self, entries: dict[Any, Any]) -> None:
        self._values += entries
        self._all(entries.values())

    def _module(self, module: nn.Module) -> None:
        own = vars(module)
        self._values.append(type(module))
        for name in HOOKS:
            if own[name]:
                self._hooks(own[name])
        self._entries(own)
        if isinstance(module, QuantModule):
            self._all(watched_tensors(module._packed))

    def _hooks(self, hooks: dict[int, Any]) -> None:
        for number, hook in list(hooks.items()):
            self._values.append(number)
            self._code(hook)

    def _code(self, code: Any) -> None:
        """Read a function, or an object that is called, and the numbers, tensors and modules that it may use."""
        self._object(code)
        if id(code) not in self._numbers:
            self._numbers[id(code)] = len(self._numbers)
            self._all(value for value in variables(code) if isinstance(value, READ_OF_CODE))

    def _tensor(self, tensor: Tensor) -> None:
        for plain in (tensor,) if type(tensor) in PLAIN else plain_tensors(tensor):
            self._values += plain.dtype, plain.shape, plain.device
            address = _address(plain)
            if address:
                # No weak reference to the tensor: torch swaps none that has one.
                self._values += address, plain.stride(), version_of(plain)
                self._tensors.append(plain)

    def _object(self, value: Any) -> None:
        self._values.append(id(value))
        try:
            self._objects.append(weakref.ref(value))
        except TypeError:
            self._objects.append(lambda: value)


@lru_cache(maxsize=4096)
def _reader(kind: type) -> Callable[[Reading, Any], None]:
    """Return how values of a kind are read."""
    if issubclass(kind, SCALARS):
        return Reading._plain
    if issubclass(kind, Tensor):
        return Reading._tensor
    if issubclass(kind, (nn.Module, PreTrainedConfig, dict, list, tuple)):
        return Reading._held
    if issubclass(kind, FUNCTIONS):
        return Reading._code
    return Reading._members if issubclass(kind, (set, frozenset)) else Reading._object


def variables(code: Any) -> Iterator[Any]:
    """Return the variables that a function reads besides its arguments, one step deep; none for one of a known
    package.
    """
    if isinstance(code, partial):
        yield from (code.func, *code.args, *code.keywords.values())
    elif isinstance(code, MethodType):
        yield code.__func__
        yield from [code.__self__] if isinstance(code.__self__, nn.Module) else variables(code.__self__)
    elif not isinstance(code, FunctionType):
        yield from getattr(code, "__dict__", {}).values()
    elif not is_known_code(code):
        yield from (*(code.__defaults__ or ()), *(code.__kwdefaults__ or {}).values())
        yield from (cell.cell_contents for cell in code.__closure__ or () if cell != CellType())
        yield from (code.__globals__[name] for name in code.__code__.co_names if name in code.__globals__)


def _address(tensor: Tensor) -> int:
    """Return the address of its numbers; 0 if none can be read: on meta, freed, or in a layout of their own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
