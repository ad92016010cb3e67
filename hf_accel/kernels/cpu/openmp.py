"""Finds the threads of torch for the kernels: the functions of the OpenMP runtime that torch has loaded."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

# What the library takes a runtime's functions by, and their names: those of GNU, and those of LLVM and Intel.
INTERFACES = {
    "hfa_use_gomp": ("GOMP_parallel", "omp_in_parallel"),
    "hfa_use_kmpc": (
        "__kmpc_fork_call", "__kmpc_push_num_threads", "__kmpc_global_thread_num", "omp_in_parallel",
    ),
}  # fmt: skip


def share_threads(library: ctypes.CDLL) -> bool:
    """Let the kernels compute on torch's threads. Return False if none are found; then the caller computes alone."""
    for runtime in loaded_runtimes():
        for use, names in INTERFACES.items():
            functions = [getattr(runtime, name, None) for name in names]
            if None not in functions:
                getattr(library, use)(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))  # type: ignore[arg-type]
                return True
    return False


def loaded_runtimes() -> Iterator[ctypes.CDLL]:
    """Yield what may be torch's runtime, the likeliest first: libraries that this process has loaded already.

    Nothing is loaded here, because a second runtime would have threads of its own.
    """
    folder = Path(torch.__file__).parent
    places = [path for here in (folder / "lib", folder.parent / "torch.libs") for path in sorted(here.glob("*omp*"))]
    if sys.platform == "win32":
        find = ctypes.WinDLL("kernel32").GetModuleHandleW
        find.restype = ctypes.c_void_p
        handles = ((path.name, find(path.name)) for path in places)
        yield from (ctypes.CDLL(name, handle=handle) for name, handle in handles if handle)
        return
    yield ctypes.CDLL(None)  # all that torch's libraries have in common is there
    for path in places:
        with suppress(OSError):
            yield ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
