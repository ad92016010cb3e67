"""Where it was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from hf_accel.hardware import detect, read_bandwidth

PACKAGES = ("hf_accel", "torch", "transformers", "bitsandbytes", "torchao", "llama_cpp_python")


def machine() -> dict[str, Any]:
    """What the CPU is and was measured to do; load_average: processes that ran beside this one at the start."""
    hardware = detect()
    return {
        "cpu": hardware.name,
        "physical_cores": hardware.physical_cores,
        "usable_cores": hardware.usable_cores,
        "threads": hardware.threads,
        "isa": hardware.isa,
        "l3_bytes": hardware.l3_bytes,
        "memory_bytes": hardware.total_memory,
        "read_bytes_per_second": read_bandwidth(hardware),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
