"""Where it was measured."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import hf_accel
from hf_accel.hardware import Hardware, detect, read_bandwidth
from hf_accel.hardware.cpu_model import cpu_numbers
from hf_accel.kernels import cpu as kernels
from hf_accel.kernels import triton

PACKAGES = (
    "torch", "transformers", "triton", "bitsandbytes", "torchao", "llama_cpp_python", "openvino", "nncf",
    "onnxruntime", "onnx",
)  # fmt: skip

# AMD's name of a core, by its family and the first of its models. A virtual machine calls all of them "AMD EPYC", and
# Zen 4 computes vectors of AVX-512 in two halves, Zen 5 whole.
AMD_CORES = {
    (23, 0x00): "Zen", (23, 0x30): "Zen 2",
    (25, 0x00): "Zen 3", (25, 0x10): "Zen 4", (25, 0x20): "Zen 3", (25, 0x60): "Zen 4",
    (26, 0x00): "Zen 5",
}  # fmt: skip


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


def machine(device: str = "cpu") -> dict[str, Any]:
    """What the CPU is and was measured to do. isa: the best that it has; kernels: what ours use of it.

    load_average: processes that ran beside this one at the start. With a GPU: what that is, and was measured to do.
    """
    host = detect()
    hardware = host if device == "cpu" else detect(device)
    return {
        **({} if device == "cpu" else gpu(hardware)),
        "cpu": " ".join(filter(None, (host.name, core()))),
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


def core(root: Path = Path("/")) -> str | None:
    """AMD's name of this CPU's cores; None where Linux does not say it, or another company made them."""
    maker, family, model = cpu_numbers(root) or ("", 0, 0)
    if maker != "AuthenticAMD":
        return None
    found = [name for first, name in AMD_CORES.items() if first[0] == family and first[1] <= model]
    return found[-1] if found else None


def gpu(hardware: Hardware) -> dict[str, Any]:
    refusal = triton.refusal("cuda")
    return {
        "gpu": hardware.name,
        "compute_capability": hardware.compute_capability and list(hardware.compute_capability),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "gpu_kernels": refusal or f"Triton {importlib.import_module('triton').__version__}",
    }


def driver() -> str | None:
    """The version of NVIDIA's driver; None where nvidia-smi does not say it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


def versions() -> dict[str, str]:
    """hf_accel's is the one that is imported, which need not be the one that is installed."""
    found = {"python": platform.python_version(), "hf_accel": hf_accel.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
