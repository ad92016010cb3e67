"""Triton kernels for NVIDIA GPUs. Importing this package does not import Triton; a module of kernels does.

With TRITON_INTERPRET=1 in the environment they run on a CPU, in Triton's interpreter, slowly. Tests use it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

OLDEST = (8, 0)  # compute capability: the first with bfloat16 and asynchronous copies
FP8 = (8, 9)  # the first whose instructions multiply float8_e4m3fn


OVERLAPPING = (9, 0)  # the first whose launches may begin while the one before them runs


INTERPRETS = ("1", "true", "on", "yes", "y")  # what Triton takes for yes in TRITON_INTERPRET


@functools.cache
def is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def version() -> str:
    import triton

    return str(triton.__version__)


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in INTERPRETS and is_installed()


# The kinds of device that the kernels are meant for; refusal() says whether they can run there.
DEVICES = ("cuda", "cpu") if is_interpreted() else ("cuda",)


def refusal(device_type: str) -> str | None:
    """Return why no Triton kernel runs on tensors of this kind of device ("cpu", "cuda"), as a clause; None if they
    do.
    """
    if device_type == "cpu":
        return None if is_interpreted() else "it runs on an NVIDIA GPU, not on a CPU"
    if device_type != "cuda":
        return f"it runs on an NVIDIA GPU, not on {device_type}"
    return _gpu_refusal()


@functools.cache
def capability() -> tuple[int, int]:
    """Return the compute capability of the GPU; (0, 0) if there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


@functools.cache
def _gpu_refusal() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU here"
    if torch.version.hip is not None:
        return "it was made for NVIDIA's GPUs, and this one is AMD's"
    if not is_installed():
        return "Triton is not installed; `pip install triton` installs it"
    if capability() < OLDEST:
        needed, found = (f"{major}.{minor}" for major, minor in (OLDEST, capability()))
        return f"it needs compute capability {needed}, and this GPU has {found}"
    return None


_OVERLAP: ContextVar[bool] = ContextVar("overlap", default=False)


def overlap() -> bool:
    """Return whether launches are made that begin while the one before them runs; see `overlapping`."""
    return _OVERLAP.get()


@contextmanager
def overlapping() -> Iterator[None]:
    """Make launches that begin while the one before them runs, on a GPU that can do so.

    A launch reads weights before it waits for the one before it: nothing within may write them.
    """
    token = _OVERLAP.set(capability() >= OVERLAPPING)
    try:
        yield
    finally:
        _OVERLAP.reset(token)
