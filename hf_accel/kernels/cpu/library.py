"""Loads the kernels' library, chooses its instruction set, and says why it cannot be used; the C structs that several
kernels share, as ctypes classes.

The struct of one kernel is in the file that calls it. The fields have the names and the order of src/kernels.h. The
sizes of the structs are compared when the library loads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, TypeVar

import torch  # before the library is loaded, because the kernels share the threads of torch
from torch import Tensor

from ...errors import HfAccelError, HfAccelWarning, UnsupportedError
from ...hardware.device import instruction_sets, usable_cores
from ...hardware.isa_levels import ISA_LEVELS, Level, choose_isa, possible_levels
from ...tensors import PLAIN, default_is_host, is_recorded
from .build import HERE, LIBRARY, REASON
from .openmp import INTERFACES, share_threads

C_TYPES = {"pointers": c_void_p, "sizes": c_int64, "floats": c_float, "ints": c_int32}
CODES = {c_void_p: "Q", c_int64: "q", c_float: "f", c_int32: "i"}  # the format characters of Python's struct module
EPILOGUES = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}
ACTIVATIONS = {"silu": 4, "gelu": 5, "gelu_tanh": 6, "gelu_quick": 7, "relu": 8, "sigmoid": 9, "relu_squared": 10}


def epilogue_number(epilogue: str | None, activation: str | None) -> int:
    """The number with which a Linear names what follows its product: a gate's epilogue, or an activation.

    Raises UnsupportedError for a name that is not known, and for both at once.
    """
    for kind, name, known in (("epilogue", epilogue, EPILOGUES), ("activation", activation, ACTIVATIONS)):
        if name is not None and name not in known:
            names = [known_name for known_name in known if known_name]
            raise UnsupportedError(f"linear: {kind} {name!r} is not known; choose one of {names}")
    if epilogue and activation:
        raise UnsupportedError(
            f"linear: {epilogue=} and {activation=}; a product has one of both, leave out the other"
        )
    return ACTIVATIONS[activation] if activation else EPILOGUES[epilogue]


def fields(**names: str) -> list[tuple[str, Any]]:
    """Make the _fields_ of a struct. For example, fields(sizes="rows size", pointers="x") makes three fields in order.

    A keyword is a key of C_TYPES. If a type is needed again later in the struct, underscores are appended to it.
    """
    return [(name, C_TYPES[kind.rstrip("_")]) for kind, words in names.items() for name in words.split()]


def packed_format(kind: type[Structure]) -> str:
    """Return the format with which Python's struct module packs the struct's fields.

    This is faster than a ctypes object, which sets the fields one by one.
    """
    codes, end = "", 0
    members: Any = kind._fields_
    for name, inner in members:
        field = getattr(kind, name)
        code = packed_format(inner)[1:] if issubclass(inner, Structure) else CODES[inner]
        codes += f"{field.offset - end}x{code}"
        end = field.offset + field.size
    return f"={codes}{ctypes.sizeof(kind) - end}x"


class Matrix(Structure):
    _fields_ = fields(
        sizes="out_features",
        pointers="weight scales zeros minima bias",
        ints="scale_dtype bias_dtype",
        sizes_="column",
        floats="divisor",
    )


class Linear(Structure):
    _fields_ = [
        *fields(ints="format group", sizes="in_features", ints_="count epilogue by_inputs"),
        ("matrices", ctypes.POINTER(Matrix)),
    ]


class LinearCall(Structure):
    _fields_ = fields(
        pointers="linear x", sizes="x_stride rows", pointers_="out", sizes_="out_stride",
        ints="x_dtype out_dtype threads tile_rows",
    )  # fmt: skip


class ExpertsCall(Structure):
    _fields_ = fields(
        pointers="linear x", sizes="x_stride rows", pointers_="out", sizes_="out_stride", pointers__="starts",
        ints="x_dtype out_dtype threads tile_rows",
    )  # fmt: skip


class ScoreBias(Structure):
    _fields_ = fields(pointers="data", sizes="sequence head query")


# The numbers of Dtype in types.h.
DTYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
    torch.uint8: 5,  # two numbers of 4 bits
}
BUILD = "python -m hf_accel.kernels.cpu.build"
STACK_LEVEL = 6  # frames from the warning to the line that calls patch()
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def refusal() -> str | None:
    """Return why the kernels cannot run on this machine, as one clause for the plan; None if they can."""
    try:
        _library()
    except (HfAccelError, OSError) as error:
        return str(error)
    return None


@functools.cache  # one warning a process says enough
def warn_of_refusal() -> None:
    """Warn that models will run slower than they could, and say what to do; nothing where the kernels can run."""
    reason = refusal()
    if reason is not None:
        way_out = "" if BUILD in reason else f"; once a C++ compiler (g++ or clang) works here, run {BUILD}"
        text = f"{reason}: the model runs on torch's own kernels, which are slower{way_out}"
    elif not _shares_threads and torch.get_num_threads() > 1:
        text = (
            "cpu kernels: they compute on one thread, because this torch has loaded no OpenMP runtime whose threads "
            "they could share; a torch from PyPI has one"
        )
    else:
        return
    warnings.warn(text, HfAccelWarning, stacklevel=STACK_LEVEL)


def library_file() -> Path:
    return Path(os.environ.get("HF_ACCEL_LIBRARY") or HERE / LIBRARY)


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_file()
    if not path.exists():
        note = HERE / REASON
        reason = note.read_text(encoding="utf-8") if note.exists() else f"run {BUILD}"
        raise UnsupportedError(f"cpu kernels: not built ({reason})")
    library = ctypes.CDLL(str(path))
    _check_sizes(library)
    library.hfa_error.restype = ctypes.c_char_p
    _selected.append(_select(library))
    global _cores, _shares_threads
    _shares_threads = share_threads(library)
    _cores = usable_cores() if _shares_threads else 1
    return library


def _select(library: Any) -> str:
    """Have the library take its best level that this CPU has, or the one that HF_ACCEL_ISA names; returns its name."""
    level = choose_isa(instruction_sets(), requested=os.environ.get("HF_ACCEL_ISA"))
    _passed_over.clear()
    if not library.hfa_select(level.encode()):
        return level
    reason = library.hfa_error().decode()
    if os.environ.get("HF_ACCEL_ISA"):
        raise UnsupportedError(f"cpu kernels: HF_ACCEL_ISA={level!r}: {reason}; unset it, or build again")
    for lower in _below(level):
        if not library.hfa_select(lower.encode()):
            _passed_over.append(f"not {level}: {reason}")
            return lower
    raise UnsupportedError(f"cpu kernels: the library was built for other CPUs ({reason}); on this one, run {BUILD}")


Struct = TypeVar("Struct", bound=Structure)
_selected: list[str] = []
_passed_over: list[str] = []
_structs: dict[str, type[Structure]] = {"Linear": Linear, "Matrix": Matrix}  # the keys are the names in C


def shared_struct(kind: type[Struct]) -> type[Struct]:
    """Register a struct whose size must be that of the library, besides those of its kernels."""
    _structs[kind.__name__] = kind
    return kind


def _check_sizes(library: ctypes.CDLL) -> None:
    """Raise UnsupportedError if functions are missing or structs have other sizes: its sources were different."""
    if all(hasattr(library, name) for name in ("hfa_size_of", *INTERFACES)):
        library.hfa_size_of.restype = ctypes.c_int64
        sizes = {name: library.hfa_size_of(name.encode()) for name in _structs}
        if sizes == {name: ctypes.sizeof(struct) for name, struct in _structs.items()}:
            return
    raise UnsupportedError(f"cpu kernels: compiled from other sources; run {BUILD}")


def _below(level: str) -> list[str]:
    """The other levels that this CPU supports, best first. One of them is "portable", which is always compiled."""
    return [low for low in _possible() if low != level]


def _possible() -> list[str]:
    return possible_levels(instruction_sets())


def isa() -> str:
    """Return the level of hardware.ISA_LEVELS in use. The environment variable HF_ACCEL_ISA, which is read once,
    overrides the choice."""
    _library()
    return _selected[-1]


def level_in_use() -> Level:
    """Return what the level in use has."""
    return ISA_LEVELS[isa()]


def better_level() -> str | None:
    """Return which level this CPU has and the library in use has not, and why; None if it has the best one."""
    _library()
    return _passed_over[-1] if _passed_over else None


@contextmanager
def using_isa(level: str) -> Iterator[None]:
    """Use another level within the `with` block, in the whole process. This is for tests and benchmarks.

    Packed weights stay valid, because all levels use the same layout. Raises UnsupportedError for a level that the CPU
    or the system does not support or that was not compiled.
    """
    previous = isa()
    choose_isa(instruction_sets(), requested=level)
    if _library().hfa_select(level.encode()):
        raise UnsupportedError(f"cpu kernels: {level!r}: {_library().hfa_error().decode()}")
    _selected.append(level)
    try:
        yield
    finally:
        _library().hfa_select(previous.encode())
        _selected.append(previous)


# These are set when the library is loaded.
_cores = 1  # cores within affinity and the container's quota; one, where the kernels have no threads
_shares_threads = True


def threads() -> int:
    """The number of threads of a kernel: torch's number, but at most the number of usable cores."""
    return min(torch.get_num_threads(), _cores)


def kernel(name: str, call: type[Structure], *, pack: Callable[..., bytes] | None = None) -> Callable[..., None]:
    """Return the kernel `name` of src/kernels.h as a function, whose arguments are all fields of its struct in order.

    The function raises HfAccelError if the kernel fails. pack: makes the struct of other arguments.
    """
    _structs[name] = call
    pack = pack or struct.Struct(packed_format(call)).pack
    function: Any = None

    def run(*fields: Any) -> None:
        nonlocal function
        if function is None:
            function = _library()[f"hfa_{name}"]
            function.argtypes = (ctypes.c_char_p,)
        if function(pack(*fields)):
            raise HfAccelError(f"the cpu kernel {name} failed: {_library().hfa_error().decode()}")

    return run


def native(x: object) -> bool:
    """Return whether a kernel may replace torch's operators on x."""
    return (
        not torch.is_grad_enabled()
        and not is_recorded()
        and type(x) in PLAIN
        and x.is_cpu  # type: ignore[attr-defined]
        and x.dtype in FLOATS  # type: ignore[attr-defined]
        and not torch.is_autocast_enabled("cpu")
        and default_is_host()
    )


def page_dtype(k_pages: Tensor, v_pages: Tensor) -> int:
    """Return the number that says the dtypes of both kinds of pages, see page_dtype.h."""
    return dtypes_of_pages(DTYPES[k_pages.dtype], DTYPES[v_pages.dtype])


def dtypes_of_pages(keys: int, values: int) -> int:
    """Return the number that says both of these, each a value of DTYPES."""
    return keys | values << 8


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x [..., size] and the stride between its rows in elements. x is copied if it has no single row stride."""
    if x.is_contiguous():
        return x, x.shape[-1]
    if x.ndim == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1]


def refuse_gradients(kernel: str, *tensors: Tensor | None) -> None:
    """Raise UnsupportedError if a tensor needs a gradient, because kernels have no backward."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(f"{kernel}: the cpu kernel has no gradient; call it under torch.no_grad()")
