"""A device and its host in one record."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..errors import UnsupportedError
from .memory import gpu_memory, host_memory
from .processor import cache_bytes, choose_isa, cpu_name, instruction_sets, physical_cores, usable_cores


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device and its host; sizes in bytes.

    name, total_memory, free_memory: of the device; compute_capability: of a CUDA device.
    usable_cores: the host's logical cores that affinity and the container's quota allow.
    threads: torch's setting when this was made.
    isa: the level of ISA_LEVELS that kernels shall use; instruction_sets: all that the CPU has.
    l2_bytes: of one core; l3_bytes: of all of them together.
    """

    device: str
    name: str
    physical_cores: int
    usable_cores: int
    threads: int
    isa: str
    instruction_sets: tuple[str, ...]
    l2_bytes: int | None
    l3_bytes: int | None
    total_memory: int | None
    free_memory: int | None
    compute_capability: tuple[int, int] | None


def detect(device: torch.device | str = "cpu") -> Hardware:
    """Describe `device`, "cpu" or "cuda[:index]". Free memory, threads and HF_ACCEL_ISA are read again at each call.

    Raises UnsupportedError for another kind of device, for CUDA where there is none, and for a bad HF_ACCEL_ISA.
    """
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"device={device!r} is not one that torch knows; use 'cpu' or 'cuda'") from error
    if target.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device={str(target)!r} cannot be described; use 'cpu' or 'cuda'")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"device={str(target)!r}: torch sees no CUDA device here; use 'cpu'")
    on_gpu = target.type == "cuda"
    features = instruction_sets()
    total, free = gpu_memory(target) if on_gpu else host_memory()
    return Hardware(
        device=str(target),
        name=torch.cuda.get_device_name(target) if on_gpu else cpu_name(),
        physical_cores=physical_cores(),
        usable_cores=usable_cores(),
        threads=torch.get_num_threads(),
        isa=choose_isa(features, requested=os.environ.get("HF_ACCEL_ISA")),
        instruction_sets=tuple(sorted(features)),
        l2_bytes=cache_bytes(2),
        l3_bytes=cache_bytes(3),
        total_memory=total,
        free_memory=free,
        compute_capability=torch.cuda.get_device_capability(target) if on_gpu else None,
    )
