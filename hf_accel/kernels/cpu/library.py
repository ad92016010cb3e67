"""The loaded library: where it is, which instruction set it uses, and why it cannot be used."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch  # first: torch brings the OpenMP runtime that the kernels share
from torch import Tensor

from ...errors import HfAccelError, UnsupportedError
from ...hardware.processor import ISA_LEVELS, choose_isa, instruction_sets, usable_cores
from ...tensors import PLAIN, is_recorded
from .build import HERE, LIBRARY, REASON
from .structs import Linear, Matrix, packed_format

# The numbers of types.h.
DTYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def refusal() -> str | None:
    """None, or why the kernels cannot run here, as one clause for the plan."""
    try:
        _library()
    except (HfAccelError, OSError) as error:
        return str(error)
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    path = os.environ.get("HF_ACCEL_LIBRARY") or HERE / LIBRARY
    if not os.path.exists(path):
        note = HERE / REASON
        reason = note.read_text(encoding="utf-8") if note.exists() else "run python -m hf_accel.kernels.cpu.build"
        raise UnsupportedError(f"cpu kernels: not built ({reason})")
    library = ctypes.CDLL(str(path))
    _check_sizes(library)
    library.hfa_error.restype = ctypes.c_char_p
    level = choose_isa(instruction_sets(), requested=os.environ.get("HF_ACCEL_ISA"))
    if library.hfa_select(level.encode()):
        if os.environ.get("HF_ACCEL_ISA"):
            raise UnsupportedError(f"cpu kernels: HF_ACCEL_ISA={level!r} was not compiled; unset it, or build again")
        level = next(lower for lower in _below(level) if not library.hfa_select(lower.encode()))
    _selected.append(level)
    global _cores
    _cores = usable_cores()
    return library


_selected: list[str] = []
_structs: dict[str, type[ctypes.Structure]] = {"Linear": Linear, "Matrix": Matrix}  # by the name that C has for each


def _check_sizes(library: ctypes.CDLL) -> None:
    """Raise UnsupportedError for a library that was compiled from other sources than these."""
    if hasattr(library, "hfa_size_of"):
        library.hfa_size_of.restype = ctypes.c_int64
        sizes = {name: library.hfa_size_of(name.encode()) for name in _structs}
        if sizes == {name: ctypes.sizeof(struct) for name, struct in _structs.items()}:
            return
    raise UnsupportedError("cpu kernels: compiled from other sources; run python -m hf_accel.kernels.cpu.build")


def _below(level: str) -> list[str]:
    """Levels that this CPU has too, best first; "portable" is always compiled."""
    return [low for low in _possible() if low != level]


def _possible() -> list[str]:
    return [level for level, needed in ISA_LEVELS.items() if needed <= instruction_sets()]


def isa() -> str:
    """The instruction set in use, a level of hardware.ISA_LEVELS. HF_ACCEL_ISA, read once, overrides the choice."""
    _library()
    return _selected[-1]


@contextmanager
def using_isa(level: str) -> Iterator[None]:
    """Use another instruction set that this CPU has, for the whole process; for tests and benchmarks.

    Packed weights stay good: every level reads the same layout. Raises UnsupportedError for a level that the CPU
    or this build does not have.
    """
    previous = isa()
    choose_isa(instruction_sets(), requested=level)
    if _library().hfa_select(level.encode()):
        raise UnsupportedError(f"cpu kernels: {level!r} was not compiled")
    _selected.append(level)
    try:
        yield
    finally:
        _library().hfa_select(previous.encode())
        _selected.append(previous)


_cores = 1  # that affinity and the container's quota leave, once the library is loaded


def threads() -> int:
    """Threads of a kernel: torch's, and no more than there are cores to use."""
    return min(torch.get_num_threads(), _cores)


def large_pages(memory: Tensor) -> None:
    """Ask for large pages under memory that was not touched yet; see api.cpp."""
    call = _library().hfa_large_pages
    call.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    call(memory.data_ptr(), memory.nbytes)


def kernel(name: str, call: type[ctypes.Structure]) -> Callable[..., None]:
    """The kernel `name` of src/kernels.h, as a function of all numbers in its struct, in order.

    That function raises HfAccelError when the kernel fails.
    """
    _structs[name] = call
    pack = struct.Struct(packed_format(call)).pack
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
    """Whether a kernel may take the place of torch's operators on x."""
    return (
        not torch.is_grad_enabled()
        and not is_recorded()
        and type(x) in PLAIN
        and x.is_cpu  # type: ignore[attr-defined]
        and x.dtype in FLOATS  # type: ignore[attr-defined]
        and not torch.is_autocast_enabled("cpu")
    )


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """x [..., size] as rows one stride apart, and that stride in elements; a copy where it has none."""
    if x.is_contiguous():
        return x, x.shape[-1]
    if x.ndim == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1]


def refuse_gradients(kernel: str, *tensors: Tensor | None) -> None:
    """Raises UnsupportedError if autograd would have to go through a kernel, which has no backward."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(f"{kernel}: the cpu kernel has no gradient; call it under torch.no_grad()")
