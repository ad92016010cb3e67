"""Where it was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import hf_accel
from hf_accel.hardware import detect, read_bandwidth
from hf_accel.kernels import cpu as kernels

PACKAGES = ("torch", "transformers", "bitsandbytes", "torchao", "llama_cpp_python", "openvino", "nncf")


class NoKernelsError(Exception):
    """What would be measured is torch's fallback."""


def require_kernels() -> None:
    """Raise NoKernelsError unless hf_accel's own kernels are loaded."""
    refusal = kernels.refusal()
    if refusal is not None:
        raise NoKernelsError(
            f"{refusal}: torch would be measured under hf_accel's name; build them, or pass --even-without-kernels"
        )


def loaded_kernels() -> str:
    """The instruction set that hf_accel's kernels use, or why they are not used."""
    return kernels.refusal() or kernels.isa()


def machine() -> dict[str, Any]:
    """What the CPU is and was measured to do. isa: the best that it has; kernels: what ours use of it.

    load_average: processes that ran beside this one at the start.
    """
    hardware = detect()
    return {
        "cpu": hardware.name,
        "physical_cores": hardware.physical_cores,
        "usable_cores": hardware.usable_cores,
        "threads": hardware.threads,
        "isa": hardware.isa,
        "kernels": loaded_kernels(),
        "l3_bytes": hardware.l3_bytes,
        "memory_bytes": hardware.total_memory,
        "read_bytes_per_second": read_bandwidth(hardware),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """hf_accel's is the one that is imported, which need not be the one that is installed."""
    found = {"python": platform.python_version(), "hf_accel": hf_accel.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
